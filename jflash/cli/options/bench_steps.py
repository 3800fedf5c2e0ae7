"""Time whole steps of several shapes and batches, of random weights, in one process.

All programs are compiled side by side before the first is timed. No draft is accepted, so a step's
time is that of its work.
"""

import argparse

from jflash.bench.shapes import model_shape
from jflash.bench.step_cases import KINDS, Case
from jflash.cli.command import Options, Parser
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
    cases = f"a kind is one of {', '.join(KINDS)}; default {USUAL}"
    add("--cases", type=cases_of, default=cases_of(USUAL), metavar="SHAPE:BATCH:KIND,…", help=cases)
    add("--contexts", type=counts, default=(656, 1024), metavar="1024", help="default 656,1024")
    add("--capacity", type=int, default=2048, help="slots of a sequence, default 2048")
    add("--steps", type=int, default=48, help="of a repeat, default 48")
    add("--repeats", type=int, default=5, help="the median counts, default 5")


def cases_of(text: str) -> tuple[Case, ...]:
    found = []
    for each in text.split(","):
        shape, batch, kind = (*each.split(":"), "", "")[:3]
        if each.count(":") != 2 or not batch.isdecimal() or int(batch) < 1 or kind not in KINDS:
            what = f"{each!r} is not SHAPE:BATCH:KIND with a kind of {', '.join(KINDS)}"
            raise argparse.ArgumentTypeError(what)
        found.append(Case(shape, int(batch), kind))
    return tuple(dict.fromkeys(found))


def check(args: Options) -> None:
    for case in args.cases:
        model_shape(case.shape)
    at_least_1(args, "steps", "repeats")
    longest, most = max(args.contexts), args.capacity - args.steps - WIDEST
    why = f"--contexts {longest}: {args.steps} steps after it leave {most} of --capacity"
    refuse(longest > most, f"{why} {args.capacity}")
    refuse(args.capacity < 64 or args.capacity % 64, f"--capacity {args.capacity}: in 64s")
