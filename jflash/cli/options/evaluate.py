"""The options of evaluate, and which of them contradict each other."""

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
from jflash.cli.options.values import at_least_1, refuse
from jflash.evals.datasets import DATASETS, REFERENCE_COUNT, REFERENCE_SHUFFLE


def make_parser(prog: str = "evaluate.py", dataset: str | None = None) -> Parser:
    """The command line, for one data set if it is given."""
    parser = Parser(prog, f"Evaluate a pair on {dataset or 'a data set'}: accuracy, τ, speed.")
    parser.set_defaults(dataset=dataset)
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
    prompt_options(group)


def _decoding_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch", type=int, default=32, metavar="B", help="default 32")
    sampling_options(group, max_new_tokens=512)
    oracle_option(group)
    group.add_argument(
        "--steps-per-call",
        type=int,
        metavar="N",
        help="steps between two refills of finished slots; default: the engine's",
    )


def check(options: argparse.Namespace) -> None:
    """ValueError for values and combinations that make no sense for the data set."""
    name = options.dataset
    at_least_1(options, ("batch", "max_new_tokens"))
    if options.steps_per_call is not None:
        at_least_1(options, ("steps_per_call",))
    refuse(
        [
            (
                options.reference_order
                and (options.limit is not None or options.shuffle is not None),
                "--reference-order with --limit or --shuffle: it is both",
            ),
            (
                options.execute and DATASETS[name].kind != "code",
                f"--execute: {name} has no programs",
            ),
            (options.few_shot < 0, f"--few-shot {options.few_shot}: 0 or more"),
            (
                options.few_shot_data and not options.few_shot,
                "--few-shot-data without --few-shot K",
            ),
            (
                options.baseline and options.drafter == "none" and options.block_size in (None, 1),
                "--baseline with --drafter none: that is plain decoding already",
            ),
        ]
    )
    check_pair(options, drawn=options.temperature > 0)
