"""The options of generate, and which of them contradict each other."""

import argparse
from pathlib import Path

from jflash.cli.command import Parser
from jflash.cli.options.pair import (
    check_pair,
    model_options,
    oracle_option,
    prompt_options,
    sampling_options,
)
from jflash.cli.options.values import ids, refuse


def make_parser(prog: str = "generate.py") -> Parser:
    parser = Parser(prog, "Decode a prompt with DFlash, several tokens a step.")
    model_options(parser.add_argument_group("models"))
    _prompt_options(parser)
    group = parser.add_argument_group("decoding")
    sampling_options(group, max_new_tokens=256)
    _ending_options(group)
    group = parser.add_argument_group("output")
    group.add_argument("--show-steps", action="store_true", help="colour each step's tokens")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _prompt_options(parser: Parser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="-, or a pipe: standard input; default: a word problem",
    )
    group.add_argument("--prompt-ids", type=ids, metavar="1,2,3", help="token ids instead")
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
    prompt_options(parser)


def _ending_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable"
    )
    group.add_argument(
        "--stop-token-ids", type=ids, default=[], metavar="1,2", help="besides the model's"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the model's own stop tokens"
    )
    oracle_option(group)


def check(options: argparse.Namespace) -> None:
    """ValueError for values and combinations that no model could make sense of."""
    batch = options.prompts is not None
    if batch != (options.output is not None):
        given, other = ("--prompts", "--output") if batch else ("--output", "--prompts")
        raise ValueError(f"{given} needs {other} FILE.jsonl")
    refuse(
        [
            (
                options.json and batch,
                "--json with --prompts: every line of --output is such an object",
            ),
            (
                options.show_steps and (options.json or batch),
                "--show-steps with --json or --prompts",
            ),
            (options.overwrite and not batch, "--overwrite without --output"),
            (options.system and options.prompt_ids is not None, "--system with --prompt-ids"),
            (
                options.reasoning == "on" and options.prompt_ids,
                "--reasoning on without the chat template",
            ),
            ("" in options.stop, "--stop '': an empty text is everywhere"),
            (options.batch_size < 1, f"--batch-size {options.batch_size}: at least 1"),
        ]
    )
    check_pair(options, drawn=options.temperature > 0 or batch)
