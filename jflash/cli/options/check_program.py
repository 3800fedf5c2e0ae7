"""Compiles the step of all layers for this GPU, autotuned, and shows what it must show.

The gates of tests/proof/test_gates.py, which compiles four layers without a GPU: one command
buffer, no copy of a cache or of weights, bounded temporaries, no spills, no sum over devices that
share the pair. Nothing is run and no weights exist.
Exit code 0: all hold; 1: not so, and where; 2: bad input or no GPU.
"""

from jflash.bench.shapes import SHAPES, model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.results import backend_options
from jflash.cli.options.values import counts, refuse

KEPT = "written there too"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--shape", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}, default qwen3-8b")
    add("--batch", type=counts, default=(1, 8, 32), metavar="1,8,32", help="default 1,8,32")
    add("--capacity", type=int, default=2048, help="cache slots a sequence, default 2048")
    shared_options(parser)
    backend_options(parser)


def check(args: Options) -> None:
    size = args.capacity
    check_shared(args)
    refuse(size < 256 or size % 256, f"--capacity {size}: a multiple of 256")
    model_shape(args.shape)
