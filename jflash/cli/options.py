"""The options of generate.py, and which of them contradict each other."""

import argparse
from pathlib import Path
from typing import NamedTuple

from jflash.backends import AUTO
from jflash.cli.command import Parser
from jflash.sampling import Sampling
from jflash.speculative import DRAFT_RULES

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-math"
DEFAULT_TARGET = str(EMBEDDED / "target")
DEFAULT_DRAFTER = str(EMBEDDED / "drafter")


class DrafterChoice(NamedTuple):
    """Where the drafter comes from: nowhere (None), a checkpoint, or its config and a seed."""

    source: str | None
    seed: int | None


def make_parser() -> Parser:
    """generate.py's command line."""
    parser = Parser("generate.py", "Decode a prompt with DFlash, several tokens a step.")
    model_options(parser.add_argument_group("models"))
    _prompt_options(parser)
    _decoding_options(parser.add_argument_group("decoding"))
    _output_options(parser.add_argument_group("output"))
    return parser


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


def _prompt_options(parser: Parser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: a word problem")
    group.add_argument("--prompt-ids", type=token_ids, metavar="1,2,3", help="token ids instead")
    group.add_argument("--prompt-file", type=Path, metavar="FILE", help="text, UTF-8")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='many: a line each, {"prompt": text} or {"prompt_ids": [ids]}; needs --output',
    )
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="a result a line")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    parser.add_argument("--batch-size", type=int, default=8, help="of --prompts, default 8")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--reasoning", choices=("on", "off"), default="off", help="the template's thinking mode"
    )
    parser.add_argument(
        "--no-chat-template", action="store_true", help="the prompt as it is, for base models"
    )


def _decoding_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default 256")
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
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable"
    )
    group.add_argument(
        "--stop-token-ids", type=token_ids, default=[], metavar="1,2", help="besides the model's"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the model's own stop tokens"
    )
    group.add_argument(
        "--oracle",
        action="store_true",
        help="the same executable, but no draft is accepted: the same greedy tokens, one a step. "
        "Above temperature 0 the tokens are the same under --draft-rule greedy alone",
    )


def _output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--show-steps", action="store_true", help="colour each step's tokens")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")


def token_ids(text: str) -> list[int]:
    """Ids from "1,2,3"; which of them exist is the model's to say."""
    try:
        return [int(piece) for piece in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ids such as 1,2,3") from None


def block_size(text: str) -> int | str:
    """A width, or 'auto'; which widths a drafter can run is its own to say."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


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
    return DrafterChoice(rest[1] if len(rest) > 1 else DEFAULT_DRAFTER, seed(int(rest[0])))


def seed(value: int) -> int:
    """A seed that JAX's keys can hold."""
    if not 0 <= value < 2**32:
        raise ValueError(f"seed {value} must be within 0 … {2**32 - 1}")
    return value


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


def draft_rule_refusals(options: argparse.Namespace, drawn: bool) -> list[tuple[bool, str]]:
    """What is wrong with --draft-rule, and why, if prompts may be `drawn` at a temperature."""
    rule = options.draft_rule == "sampled"
    return [
        (rule and not drawn, "--draft-rule sampled needs a --temperature above 0"),
        (rule and options.drafter == "none", "--draft-rule sampled without a drafter"),
    ]


def check_options(options: argparse.Namespace) -> None:
    """ValueError for values and combinations that no model could make sense of."""
    batch = options.prompts is not None
    if batch != (options.output is not None):
        given, other = ("--prompts", "--output") if batch else ("--output", "--prompts")
        raise ValueError(f"{given} needs {other} FILE.jsonl")
    refused = [
        (options.json and batch, "--json with --prompts: every line of --output is such an object"),
        (options.show_steps and (options.json or batch), "--show-steps with --json or --prompts"),
        (options.overwrite and not batch, "--overwrite without --output"),
        (options.system and options.prompt_ids is not None, "--system with --prompt-ids"),
        (options.system and options.no_chat_template, "--system with --no-chat-template"),
        (
            options.reasoning == "on" and (options.no_chat_template or options.prompt_ids),
            "--reasoning on without the chat template",
        ),
        (
            options.block_size == AUTO and options.drafter == "none",
            "--block-size auto without a drafter",
        ),
        ("" in options.stop, "--stop '': an empty text is everywhere"),
        (options.batch_size < 1, f"--batch-size {options.batch_size}: at least 1"),
        *draft_rule_refusals(options, drawn=options.temperature > 0 or batch),
        (
            options.drafter is None and options.target != DEFAULT_TARGET,
            f"--target {options.target} needs its own --drafter (a folder, a hub id, or none)",
        ),
    ]
    for wrong, why in refused:
        if wrong:
            raise ValueError(why)
    seed(options.seed)
    sampling(options)
    drafter_choice(drafter_name(options))
