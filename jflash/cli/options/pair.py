"""Options that name a pair and how it decodes, shared by the commands that decode."""

import argparse
from typing import NamedTuple

from jflash.cli.options.values import block_size, check_seed, refuse
from jflash.decoding import DRAFT_RULES, Sampling
from jflash.embedded import EMBEDDED_PAIR
from jflash.kernels import AUTO

DEFAULT_TARGET = str(EMBEDDED_PAIR / "target")
DEFAULT_DRAFTER = str(EMBEDDED_PAIR / "drafter")


class DrafterChoice(NamedTuple):
    """Where the drafter comes from: nowhere (None), a checkpoint, or its config and a seed."""

    source: str | None
    seed: int | None


def model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target",
        metavar="SOURCE",
        default=DEFAULT_TARGET,
        help="a folder in Hugging Face or Orbax form, a .gguf file or a hub id; "
        "default: the embedded one",
    )
    group.add_argument(
        "--drafter",
        metavar="SOURCE",
        help="default: the embedded one; none: without; random:SEED or random:SEED:SOURCE: "
        "that drafter's config with random weights (the same greedy tokens, slower; above "
        "temperature 0 the same ones under --draft-rule greedy alone)",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    group.add_argument(
        "--attention-backend",
        metavar="NAME",
        default=AUTO,
        help="mosaic_gpu, triton or xla; default: the best that the device has",
    )
    group.add_argument(
        "--block-size",
        type=block_size,
        metavar="W",
        help="default: the drafter's own; without one 1; auto: the best by the measured table",
    )


def prompt_options(group: argparse._ActionsContainer) -> None:
    """How a text becomes the prompt of a model."""
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--reasoning", choices=("on", "off"), default="off", help="the template's thinking mode"
    )
    group.add_argument(
        "--no-chat-template", action="store_true", help="the prompt as it is, for base models"
    )


def sampling_options(group: argparse._ArgumentGroup, max_new_tokens: int) -> None:
    group.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="N",
        help=f"default {max_new_tokens}",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the best K tokens")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the fewest that hold this share"
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="keep this share of the best one's"
    )
    group.add_argument(
        "--draft-rule",
        choices=DRAFT_RULES,
        help="at a temperature: drafts are the drafter's best tokens, or drawn from it (default)",
    )
    group.add_argument("--seed", type=int, default=0, help="of the draws, default 0")


def oracle_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--oracle",
        action="store_true",
        help="the same executable, but no draft is accepted: the same greedy tokens, one a step. "
        "Above temperature 0 the tokens are the same under --draft-rule greedy alone",
    )


def drafter_name(options: argparse.Namespace) -> str:
    """The drafter as the user named it, or the embedded one."""
    return DEFAULT_DRAFTER if options.drafter is None else options.drafter


def drafter_choice(text: str) -> DrafterChoice:
    """none, random:SEED, random:SEED:SOURCE or SOURCE."""
    if text == "none":
        return DrafterChoice(None, None)
    kind, *rest = text.split(":", 2)
    if kind != "random":
        return DrafterChoice(text, None)
    if not rest or not rest[0].isdecimal():
        raise ValueError(f"--drafter {text}: give a seed, such as random:0")
    return DrafterChoice(rest[1] if len(rest) > 1 else DEFAULT_DRAFTER, check_seed(int(rest[0])))


def sampling(options: argparse.Namespace) -> Sampling:
    """How requests draw that say nothing else; ValueError in the words of the command line."""
    try:
        return Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )
    except ValueError as error:
        field, _, why = str(error).partition(" ")
        why = why.replace("a temperature", "a --temperature")
        raise ValueError(f"--{field.replace('_', '-')} {why}") from None


def check_pair(options: argparse.Namespace, drawn: bool) -> None:
    """ValueError for contradictions; `drawn`: prompts may be drawn at a temperature."""
    rule = options.draft_rule == "sampled"
    refuse(
        [
            (rule and not drawn, "--draft-rule sampled needs a --temperature above 0"),
            (rule and options.drafter == "none", "--draft-rule sampled without a drafter"),
            (
                options.block_size == AUTO and options.drafter == "none",
                "--block-size auto without a drafter",
            ),
            (
                options.drafter is None and options.target != DEFAULT_TARGET,
                f"--target {options.target} needs its own --drafter (a folder, a hub id, or none)",
            ),
            (options.system and options.no_chat_template, "--system with --no-chat-template"),
            (
                options.reasoning == "on" and options.no_chat_template,
                "--reasoning on without the chat template",
            ),
        ]
    )
    check_seed(options.seed)
    sampling(options)
    drafter_choice(drafter_name(options))
