"""The options of evaluate.py, and which of them contradict each other."""

import argparse
from pathlib import Path

from jflash.backends import AUTO
from jflash.cli.command import Parser
from jflash.cli.options import (
    DEFAULT_TARGET,
    draft_rule_refusals,
    drafter_choice,
    drafter_name,
    model_options,
    sampling,
    seed,
)
from jflash.engine import STEPS_PER_CALL
from jflash.evals.datasets import DATASETS, REFERENCE_COUNT, REFERENCE_SHUFFLE
from jflash.speculative import DRAFT_RULES


def make_parser(prog: str = "evaluate.py", dataset: str | None = None) -> Parser:
    """The command line, for one data set if it is given."""
    parser = Parser(prog, f"Evaluate a pair on {dataset or 'a data set'}: accuracy, τ, speed.")
    model_options(parser.add_argument_group("models"))
    _data_options(parser.add_argument_group("problems"), dataset)
    _decoding_options(parser.add_argument_group("decoding"))
    group = parser.add_argument_group("results")
    group.add_argument("--output", type=Path, metavar="DIR", help="default: evaluation-DATASET")
    group.add_argument("--overwrite", action="store_true", help="forget the run in --output")
    group.add_argument(
        "--baseline", action="store_true", help="plain decoding of the same prompts as well"
    )
    group.add_argument(
        "--same-as",
        type=Path,
        metavar="DIR",
        help="a finished run of the same problems, with another drafter or --oracle: exit code 1 "
        "unless every answer has the same tokens",
    )
    group.add_argument(
        "--execute",
        action="store_true",
        help="run the programs of humaneval and mbpp with their tests. A program and all that it "
        "starts together are held to 10 s, 2 GiB, 64 processes and 64 MiB of files in a folder of "
        "their own, and ended with it. That is no sandbox: they run as you, may read, write and "
        "kill what you may, and use your network",
    )
    return parser


def _data_options(group: argparse._ArgumentGroup, dataset: str | None) -> None:
    if dataset is None:
        group.add_argument("--dataset", choices=tuple(DATASETS), required=True)
    group.add_argument(
        "--data", type=Path, metavar="FILE.jsonl", help="instead of the hub's (.gz is read too)"
    )
    group.add_argument("--limit", type=int, metavar="N", help="the first N problems")
    group.add_argument("--shuffle", type=int, metavar="SEED", help="the problems, before --limit")
    group.add_argument(
        "--reference-order",
        action="store_true",
        help=f"as the authors: --shuffle {REFERENCE_SHUFFLE} --limit {REFERENCE_COUNT}",
    )
    group.add_argument(
        "--prompt-style",
        default="reference",
        metavar="NAME",
        help="reference (the authors', default), plain, hashes (mathematics), tests (mbpp)",
    )
    group.add_argument("--few-shot", type=int, default=0, metavar="K", help="worked examples first")
    group.add_argument("--few-shot-data", type=Path, metavar="FILE.jsonl", help="where from")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--reasoning", choices=("on", "off"), default="off", help="the template's thinking mode"
    )
    group.add_argument(
        "--no-chat-template", action="store_true", help="prompts as they are, for base models"
    )


def _decoding_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch", type=int, default=32, metavar="B", help="default 32")
    group.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default 512")
    group.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument(
        "--draft-rule",
        choices=DRAFT_RULES,
        help="above temperature 0: the drafter's likeliest token, or a draw from its distribution "
        "(default)",
    )
    group.add_argument("--seed", type=int, default=0, help="of the draws, default 0")
    group.add_argument(
        "--oracle",
        action="store_true",
        help="the same executable, but no draft is accepted: the same greedy tokens, one a step. "
        "Above temperature 0 the tokens are the same under --draft-rule greedy alone",
    )
    group.add_argument(
        "--steps-per-call",
        type=int,
        default=STEPS_PER_CALL,
        metavar="N",
        help=f"steps between two refills of finished slots, default {STEPS_PER_CALL}",
    )


def check_options(options: argparse.Namespace, name: str) -> None:
    """ValueError for values and combinations that make no sense for the data set `name`."""
    kind = DATASETS[name].kind
    for wrong, why in [
        (options.batch < 1, f"--batch {options.batch}: at least 1"),
        (options.steps_per_call < 1, f"--steps-per-call {options.steps_per_call}: at least 1"),
        (options.max_new_tokens < 1, f"--max-new-tokens {options.max_new_tokens}: at least 1"),
        (
            options.reference_order and (options.limit is not None or options.shuffle is not None),
            "--reference-order with --limit or --shuffle: it is both",
        ),
        (options.execute and kind != "code", f"--execute: {name} has no programs"),
        (options.few_shot < 0, f"--few-shot {options.few_shot}: 0 or more"),
        (options.few_shot_data and not options.few_shot, "--few-shot-data without --few-shot K"),
        (options.system and options.no_chat_template, "--system with --no-chat-template"),
        (
            options.reasoning == "on" and options.no_chat_template,
            "--reasoning on without the chat template",
        ),
        (
            options.baseline and options.drafter == "none" and options.block_size in (None, 1),
            "--baseline with --drafter none: that is plain decoding already",
        ),
        *draft_rule_refusals(options, drawn=options.temperature > 0),
        (
            options.block_size == AUTO and options.drafter == "none",
            "--block-size auto without a drafter",
        ),
        (
            options.drafter is None and options.target != DEFAULT_TARGET,
            f"--target {options.target} needs its own --drafter (a folder, a hub id, or none)",
        ),
    ]:
        if wrong:
            raise ValueError(why)
    seed(options.seed)
    sampling(options)
    drafter_choice(drafter_name(options))
