"""Time whole steps of several shapes and batches, of random weights, in one process.

All programs are compiled side by side before the first is timed. No draft is accepted, so a step's
time is that of its work, which is shown beside the least that this device could take.
"""

import argparse
from pathlib import Path

from jflash.bench.shapes import QUANTISED, check_quantised, form_of, model_shape
from jflash.bench.steps.cases import KINDS, PLACES, ROWS, Case, rows_of
from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.results import backend_options
from jflash.cli.options.values import at_least_1, counts, refuse

WIDEST = 32  # block
KEPT = "kept there row by row, so that a run cut off keeps its rows"
USUAL = ",".join((
    *("qwen3-8b:1:plain", "qwen3-8b:8:plain", "qwen3-8b:32:plain"),
    *("qwen3-8b:1:step", "qwen3-8b:8:step", "qwen3-8b:32:step", "qwen3-8b:64:step"),
    *("qwen3-8b:1:float8", "qwen3-8b:8:float8", "qwen3-8b:32:float8"),
))  # fmt: skip


def declare(parser: Parser) -> None:
    add = parser.add_argument
    kinds = (
        f"a kind is one of {', '.join(KINDS)}, or {ROWS}: that verifies N rows a sequence; keys "
    )
    kinds += f"and values lie in {' or '.join(PLACES)} (:PLACE after the kind); SHAPE+FORM keeps "
    kinds += f"the target's weights in {' or '.join(QUANTISED)}"
    turn = "an empty file: commands that name it compile at once and are timed one after another"
    longest = "on a GPU, also the N kernels of a step that take longest, by a profiler's trace"
    add("--cases", type=cases_of, default=cases_of(USUAL), metavar="SHAPE:BATCH:KIND,…",
        help=f"{kinds}; default {USUAL}")  # fmt: skip
    add("--contexts", type=counts, default=(656, 1024), metavar="1024", help="default 656,1024")
    add("--capacity", type=int, default=2048, help="slots of a sequence, default 2048")
    add("--steps", type=int, default=48, help="of a repeat, default 48")
    add("--repeats", type=int, default=5, help="the median counts, default 5")
    add("--kernels", type=int, default=0, metavar="N", help=longest)
    add("--in-turn", type=Path, metavar="FILE", help=turn)
    shared_options(parser, "the pair of every case")
    backend_options(parser)


def cases_of(text: str) -> tuple[Case, ...]:
    found = []
    for each in text.split(","):
        shape, batch, kind, *places = (each + "::" * (each.count(":") < 2)).split(":")
        known = kind in KINDS or rows_of(kind) is not None
        if each.count(":") not in (2, 3) or not batch.isdecimal() or int(batch) < 1 or not known:
            kinds = ", ".join((*KINDS, ROWS))
            what = f"{each!r} is not SHAPE:BATCH:KIND with a kind of {kinds}"
            raise argparse.ArgumentTypeError(what)
        if not set(places) <= set(PLACES):
            raise argparse.ArgumentTypeError(f"{each!r}: a place is one of {', '.join(PLACES)}")
        name, form = form_of(shape)
        found.append(Case(name, int(batch), kind, *places)._replace(quantised=form))
    return tuple(dict.fromkeys(found))


def check(args: Options) -> None:
    check_shared(args)
    for case in args.cases:
        target, drafter = model_shape(case.shape)
        width = drafter.block_size
        few = f"{case.shape}:{case.batch}:{case.kind}: a block of {case.shape} has {width} rows"
        refuse((rows_of(case.kind) or 1) >= width, f"--cases {few}")
        if case.quantised is not None:
            check_quantised(case.shape, case.quantised)
        dense = args.experts_over == "devices" and not target.experts
        refuse(dense, f"--experts-over devices: {case.shape} has no experts")
    at_least_1(args, "steps", "repeats")
    refuse(args.kernels < 0, f"--kernels {args.kernels}: 0 or more")
    longest, most = max(args.contexts), args.capacity - args.steps - WIDEST
    why = f"--contexts {longest}: {args.steps} steps after it leave {most} of --capacity"
    refuse(longest > most, f"{why} {args.capacity}")
    refuse(args.capacity < 64 or args.capacity % 64, f"--capacity {args.capacity}: in 64s")
