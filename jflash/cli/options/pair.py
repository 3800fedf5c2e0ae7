"""Options that name a pair and how it decodes, shared by the commands that decode."""

import argparse
from typing import Any

from jflash.cli.command import Options
from jflash.cli.options.values import at_least_1, check_seed, option_name, refuse, rows
from jflash.records.decoding import DRAFT_RULES, Sampling
from jflash.records.kernels import AUTO
from jflash.records.parts import OVER
from jflash.system.embedded import EMBEDDED_PAIR

DEFAULT_TARGET = str(EMBEDDED_PAIR / "target")
DEFAULT_DRAFTER = str(EMBEDDED_PAIR / "drafter")
TARGET = (
    "a folder in Hugging Face or Orbax form, a .gguf file or a hub id; default: the embedded one"
)
DRAFTER = """default: the embedded one; none: without; random:SEED or random:SEED:SOURCE: that
drafter's config with random weights (the same greedy tokens, slower; above temperature 0 the same
ones only under --draft-rule greedy)"""
BACKEND = "canonical, mosaic_gpu, triton or xla; default: the best that the device has"
QUANTISED = """a quantised target's weights in memory, which changes no bit: kept as codes with
scales, or dequantised when they are read; default: kept where the device's kernels read codes and
either no step is slower for it or arrays would take more than two thirds of its memory"""
FLOAT8 = """the drafter's products and its copy of the target's head in e4m3; outputs do not depend
on it, but for a seed's draws under --draft-rule sampled; default: the pair's dtype"""
WIDTH = "default: the drafter's; without one 1"
ROWS = """rows that a step verifies, of all blocks together, by the drafter's confidence, or with
recurrent layers as many of each block. auto: from batch 8 on, with experts always, as many as pay
where no text depends on it; default: auto on GPUs from batch 8 on and with experts, else all"""
SHARED = "devices of this host that share {}, default 1"
EXPERTS = "each device has some columns of every expert (default), or some experts whole"
RULE = "at a temperature: drafts are the drafter's best tokens, or drawn from it (default)"
ORACLE = """the same executable, but no draft is accepted: the same greedy tokens, one a step. Above
temperature 0 the tokens are the same only under --draft-rule greedy"""


def model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--target", metavar="SOURCE", default=DEFAULT_TARGET, help=TARGET)
    add("--drafter", metavar="SOURCE", help=DRAFTER)
    add("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    add("--quantised", choices=(AUTO, "kept", "dequantised"), default=AUTO, help=QUANTISED)
    add("--drafter-dtype", choices=("float8",), default="", help=FLOAT8)
    add("--attention-backend", metavar="NAME", default=AUTO, help=BACKEND)
    add("--block-size", type=int, metavar="W", help=WIDTH)
    add("--verify-rows", type=rows, metavar="R", help=ROWS)
    shared_options(group)


def shared_options(group: argparse._ActionsContainer, what: str = "both models") -> None:
    """How many devices share the models, and how."""
    add = group.add_argument
    add("--tensor-parallel", type=int, default=1, metavar="N", help=SHARED.format(what))
    add("--experts-over", choices=OVER, default=OVER[0], help=EXPERTS)


def check_shared(options: Options) -> None:
    at_least_1(options, "tensor_parallel")
    alone = options.experts_over == "devices" and options.tensor_parallel == 1
    refuse(alone, "--experts-over devices needs --tensor-parallel of 2 or more")


def shared_note(options: Options) -> dict[str, Any]:
    """What a result says of devices that share the models; nothing of one."""
    if options.tensor_parallel == 1:
        return {}
    return {"tensor_parallel": options.tensor_parallel, "experts_over": options.experts_over}


EFFORTS = ("low", "medium", "high")


def prompt_options(group: argparse._ActionsContainer) -> None:
    """How a text becomes the prompt of a model."""
    add, thinking = group.add_argument, "the template's thinking mode, or its reasoning effort"
    add("--system", metavar="TEXT", help="system message")
    add("--reasoning", choices=("on", "off", *EFFORTS), default="off", help=thinking)
    add("--no-chat-template", action="store_true", help="the prompt as it is, for base models")


def sampling_options(group: argparse._ArgumentGroup, max_new_tokens: int) -> None:
    add, new = group.add_argument, max_new_tokens
    add("--max-new-tokens", type=int, default=new, metavar="N", help=f"default {new}")
    filter_options(group)
    add("--draft-rule", choices=DRAFT_RULES, help=RULE)
    add("--seed", type=int, default=0, help="of the draws, default 0")


def filter_options(group: argparse._ArgumentGroup) -> None:
    """The temperature and the filters that `sampling` reads."""
    add = group.add_argument
    add("--temperature", type=float, default=0.0, help="default 0: greedy")
    add("--top-k", type=int, default=0, metavar="K", help="keep the best K tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the fewest with this share")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop less than this of the best")


def oracle_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--oracle", action="store_true", help=ORACLE)


def check_oracle(options: Options) -> None:
    """ValueError for a comparison with itself."""
    refuse(options.oracle and options.drafter == "none", "--oracle without a drafter")


def drafter_name(options: Options) -> str:
    """The drafter as the user named it, or the embedded one."""
    return DEFAULT_DRAFTER if options.drafter is None else options.drafter


def drafter_choice(text: str) -> tuple[str | None, int | None]:
    """Source and seed from none, random:SEED, random:SEED:SOURCE or SOURCE.

    The source is None without a drafter; a seed stands for random weights of the source's config.
    """
    if text == "none":
        return None, None
    kind, *rest = text.split(":", 2)
    if kind != "random":
        return text, None
    wrong = not rest or not rest[0].isdecimal()
    refuse(wrong, f"--drafter {text}: give a seed, such as random:0")
    return rest[1] if len(rest) > 1 else DEFAULT_DRAFTER, check_seed(int(rest[0]))


def sampling(options: Options) -> Sampling:
    """The draws of requests that set none; ValueError names the option."""
    o = options
    try:
        return Sampling(temperature=o.temperature, top_k=o.top_k, top_p=o.top_p, min_p=o.min_p)
    except ValueError as error:
        field, _, why = str(error).partition(" ")
        why = why.replace("a temperature", "a --temperature")
        raise ValueError(f"{option_name(field)} {why}") from None


def check_pair(options: Options, drawn: bool) -> None:
    """ValueError for contradictions; `drawn`: prompts may be drawn at a temperature."""
    o = options
    draws, plain = o.draft_rule == "sampled", o.drafter == "none"
    refuse(draws and not drawn, "--draft-rule sampled needs a --temperature above 0")
    refuse(o.draft_rule and plain, f"--draft-rule {o.draft_rule} without a drafter")
    refuse(o.verify_rows is not None and plain, f"--verify-rows {o.verify_rows} without a drafter")
    refuse(o.drafter_dtype and plain, f"--drafter-dtype {o.drafter_dtype} without a drafter")
    needs = f"--target {o.target} needs --drafter (a folder, a hub id, or none)"
    refuse(o.drafter is None and o.target != DEFAULT_TARGET, needs)
    refuse(o.system and o.no_chat_template, "--system with --no-chat-template")
    thinks = o.reasoning != "off"
    refuse(thinks and o.no_chat_template, f"--reasoning {o.reasoning} without the chat template")
    check_shared(o)
    check_seed(o.seed)
    sampling(o)
    drafter_choice(drafter_name(o))
