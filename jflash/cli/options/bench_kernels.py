"""The options of bench-kernels; the names of ops and shapes are jflash.bench.kernel_cases'."""

import argparse

from jflash.cli.command import Parser
from jflash.cli.options.results import check_result, result_options
from jflash.cli.options.values import at_least_1

WHAT = "Kernels by themselves: op × shape × backend, microseconds, share of bandwidth and error."
EPILOG = "Beside XLA, and beside flash-attn3-jax where it is installed. Needs a GPU."


def make_parser(prog: str = "bench_kernels.py") -> Parser:
    parser = Parser(prog, WHAT, EPILOG)
    add = parser.add_argument
    ops = "folders of pallas_kernels, default block_attention; a wrong name prints them all"
    add("--op", default="block_attention", metavar="A,B", help=ops)
    add("--shape", metavar="A,B", help="names of pallas_kernels/shapes.py, default all of the op")
    add("--backend", metavar="A,B", help="default: what the op has for a GPU, and outside ones")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--rounds", type=int, default=9, help="of which the median is shown")
    result_options(parser, "kept there row by row, so that a run cut off keeps its rows")
    return parser


def check(args: argparse.Namespace) -> None:
    """ValueError for what is wrong whatever ops there are."""
    at_least_1(args, "rounds")
    check_result(args)
