"""Time whole steps on one device and on several that share the pair, in one run.

Random weights, as for benchmark --shape; each number of devices runs in a separate process, one
after the other, and its time stands beside that of the smallest number. Without --cases these are
the sizes of the table for hosts of several GPUs. A case that few devices cannot hold is left out
for them.
"""

import argparse

from jflash.bench.shapes import QUANTISED, SHAPES, check_quantised, form_of, model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.values import at_least_1, counts, refuse, refuse_unread
from jflash.records.parts import OVER

KEPT = "kept there case by case"
CASES: tuple[tuple[str, tuple[int, ...]], ...]
CASES = (("qwen3-8b", (1, 32)), ("qwen3-coder-30b", (1, 8)), ("qwen3-32b", (1,)))


# What only steps need.
OF_STEPS = {"cases": CASES, "devices": (1, 2), "experts_over": OVER[:1], "context": 1024}
OF_STEPS |= {"dtype": None, "steps": 64, "repeats": 5}


def declare(parser: Parser) -> None:
    add = parser.add_argument
    listed = " ".join(f"{shape}:{','.join(map(str, batches))}" for shape, batches in CASES)
    what = f"shapes and batch sizes, default {listed}; shapes: {', '.join(SHAPES)}; SHAPE+FORM "
    what += f"keeps the target's weights in {' or '.join(QUANTISED)}"
    add("--cases", nargs="+", type=case, default=CASES, metavar="SHAPE:BATCHES", help=what)
    add("--devices", type=counts, default=(1, 2), metavar="1,2,4", help="default 1,2")
    experts = "what several devices share of experts, default columns: some of each, or whole ones"
    add("--experts-over", type=ways, default=OVER[:1], metavar="columns,devices", help=experts)
    gathers = "time the gathers of all devices by each backend, and no steps"
    add("--gathers", action="store_true", help=gathers)
    add("--context", type=int, default=1024, help="tokens before the timed steps, default 1024")
    add("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    add("--steps", type=int, default=64, help="of one repeat, default 64")
    add("--repeats", type=int, default=5, help="default 5")


def case(text: str) -> tuple[str, tuple[int, ...]]:
    """A shape and batch sizes out of "qwen3-8b:1,32"."""
    shape, colon, batches = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is no case such as qwen3-8b:1,32")
    return shape, counts(batches)


def ways(text: str) -> tuple[str, ...]:
    """Some of OVER out of "columns,devices"."""
    names = tuple(dict.fromkeys(text.split(",")))
    if set(names) - set(OVER):
        raise argparse.ArgumentTypeError(f"{text!r}: of {','.join(OVER)}")
    return names


def check(args: Options) -> None:
    if args.gathers:
        refuse_unread(args, OF_STEPS, "with --gathers, which times no steps")
    at_least_1(args, "context", "steps", "repeats")
    names = [form_of(text)[0] for text, _ in args.cases]
    shared = any(model_shape(name).target.experts for name in names) and max(args.devices) > 1
    named = f"--experts-over {','.join(args.experts_over)}"
    why = f"{named}: no case has experts on several --devices"
    refuse(args.experts_over != OVER[:1] and not shared, why)
    for text, _ in args.cases:
        shape, form = form_of(text)
        target, drafter = model_shape(shape)
        if form is not None:
            check_quantised(shape, form)
        positions = min(target.max_position_embeddings, drafter.max_position_embeddings)
        beyond = args.context > positions
        refuse(beyond, f"--context {args.context}: {shape} has {positions} positions")
    timed = "--no-compilation-cache: the command times a new cache for each case"
    refuse(args.no_compilation_cache, timed)
