"""Kernels by themselves: op × shape × backend, microseconds, share of bandwidth and error.

Beside XLA, and beside flash-attn3-jax where it is installed. Needs a GPU.
"""

from jflash.cli.command import Options, Parser
from jflash.cli.options.values import at_least_1

KEPT = "kept there row by row, so that a run cut off keeps its rows"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    ops = "folders of pallas_kernels, default block_attention; a wrong name prints them all"
    add("--op", default="block_attention", metavar="A,B", help=ops)
    add("--shape", metavar="A,B", help="names of pallas_kernels/shapes.py, default all of the op")
    add("--backend", metavar="A,B", help="default: what the op has for a GPU, and outside ones")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--rounds", type=int, default=9, help="of which the median is shown")


def check(args: Options) -> None:
    at_least_1(args, "rounds")
