"""The options of check-lossless."""

import argparse

from jflash.cli.command import Parser
from jflash.cli.options.results import backend_options, check_result, result_options
from jflash.cli.options.values import at_least_1, check_seed, counts, refuse
from jflash.proof.pairs import PAIRS

EPILOG = """
Trained, random and replaying drafters decode 100,000 tokens, for every pair and batch size through
one executable, and must give the tokens, K/V and logits of its oracle, which accepts no draft. A
fault planted on purpose must be caught. Exit code 0: lossless; 1: not so; 2: bad input.
"""


def make_parser(prog: str = "check_lossless.py") -> Parser:
    parser = Parser(
        prog,
        "Shows that greedy decoding is lossless on this device, bit for bit, or where it is not.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    usual = tuple(PAIRS)[:2]
    add("--pairs", type=names, default=usual, help=f"of {','.join(PAIRS)}; default the first two")
    add("--batches", type=counts, default=(1, 8, 32), metavar="1,8,32", help="default 1,8,32")
    add("--tokens", type=int, default=100_000, help="by the oracles in all, default 100000")
    add("--min-count", type=int, default=1000, help="of every acceptance length, default 1000")
    add("--min-distinct", type=int, default=1000, help="tokens in the outputs, default 1000")
    add("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    backend_options(parser)
    add("--seed", type=int, default=0, help="of prompts, wrong drafts and a random drafter")
    result_options(parser, "written there too")
    return parser


def names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


def check(args: argparse.Namespace) -> None:
    """ValueError for what cannot be checked anywhere."""
    unknown = [name for name in args.pairs if name not in PAIRS]
    refuse(
        [(unknown, f"--pairs: no pair is called {''.join(unknown[:1])!r}, use {','.join(PAIRS)}")]
    )
    at_least_1(args, ("tokens", "min_count", "min_distinct"))
    check_result(args)
    check_seed(args.seed)
