"""Compares the logits of the program that decodes with float32's, and with XLA's rounding.

Random weights of a published shape, normal(0, 0.02), with norms by which attention and logits are
as spread as a trained target's, and random texts, which go through prefill and blocks at width 1
and at the drafter's width: in bfloat16 by the kernels that decode, the same by XLA's operations,
and in float32 by a separate pass. Hybrids, dense Gemma and Muse-Glimmer, which that pass has not,
go through our own modules by XLA in float32. Our kernels may be 3 times as far from float32 as
XLA's rounding is. A fault planted in the weights of one pass must be farther away.
Devices may share our kernels' pass (--tensor-parallel); all else is of the first, which has the
whole target too.
Exit code 0: the logits are right; 1: not so, and where; 2: bad input.
"""

import math

from jflash.bench.shapes import SHAPES, model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.results import backend_options
from jflash.cli.options.values import at_least_1, check_seed, counts, refuse
from jflash.records.kernels import AUTO

SCALE = 0.02
KEPT = "written there too"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    default = "qwen3-coder-30b"
    add("--shape", default=default, help=f"one of {', '.join(SHAPES)}, default {default}")
    add("--layers", type=int, default=8, help="of the target, at most; default 8")
    add("--batch", type=counts, default=(1, 8), metavar="1,8", help="default 1,8")
    add("--seed", type=int, default=0, help="of the texts")
    text = "of the embedding's random numbers, default 0.02; larger makes tokens differ more"
    add("--embedding-scale", type=float, default=SCALE, metavar="X", help=text)
    shared_options(parser, "the pass that is checked")
    backend_options(parser)


def check(args: Options) -> None:
    at_least_1(args, "layers")
    check_shared(args)
    pushed = args.gather_backend not in (None, AUTO, "xla") and args.tensor_parallel > 1
    refuse(pushed, f"--gather-backend {args.gather_backend}: devices gather by xla here")
    scale, tied = args.embedding_scale, model_shape(args.shape).target.tie_embeddings
    refuse(not 0 < scale < math.inf, f"--embedding-scale {scale}: a number above 0")
    why = f"--embedding-scale {scale}: the head of {args.shape} is its embedding"
    refuse(tied and scale != SCALE, why)
    check_seed(args.seed)
