"""Step times of a pair beside the device's limits: plain decoding, verify, draft, step.

Random weights (--shape) give times of steps, never a speed: that takes a real pair, or an
acceptance that you state. Every batch size runs in separate processes, one after the other.
"""

import argparse
import sys
from pathlib import Path

from jflash.bench.shapes import QUANTISED, SHAPES, check_quantised, model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.results import backend_options
from jflash.cli.options.values import at_least_1, counts, refuse, refuse_unread

KEPT = "kept there case by case"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--shape", help=f"random weights of a published shape: {', '.join(SHAPES)}")
    add("--target", type=Path, metavar="DIR", help="a real pair instead, with --drafter")
    add("--drafter", type=Path, metavar="DIR")
    add("--batch", type=counts, default=(1,), metavar="1,8,32", help="default 1")
    add("--context", type=int, default=1024, help="tokens before the timed steps, default 1024")
    add("--capacity", type=int, help="cache slots a sequence, default twice the context")
    add("--widths", type=counts, default=(), metavar="4,8,16", help="the step at these too")
    add("--only-step", action="store_true", help="leave plain decoding, verify and draft out")
    prompts = "prompts of so many tokens, each by itself, through the prefill too"
    add("--prefill", type=counts, default=(), metavar="512,2048", help=prompts)
    chunk = "tokens of a prompt that one pass computes; default: the drivers'"
    add("--prefill-chunk", type=int, metavar="N", help=chunk)
    shared_options(parser, "the pair, with --only-step")
    add("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    add("--quantised", choices=tuple(QUANTISED), help="the layers of a shape's target; one device")
    add("--drafter-dtype", choices=("float8",), default="", help="by default the pair's")
    backend_options(parser)
    add("--acceptance", type=float, metavar="TAU", help="tokens a step to assume, for tokens/s")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="for a real pair; a few are built in")
    add("--max-new-tokens", type=int, default=256, help="of each prompt, default 256")
    add("--beside", metavar="SHAPE", help="the step of another shape, timed right after each case")
    add("--against", choices=("reference",), help="the PyTorch code on the same weights, batch 1")
    add("--reference-python", default=sys.executable, metavar="PATH", help="that has dflash 0.1.0")
    add("--steps", type=int, default=64, help="of one repeat, default 64")
    add("--repeats", type=int, default=5, help="default 5")
    add("--no-memory", action="store_true", help="no second process: no warm compile, no peak")
    # One stage of one case, in a separate process: TASK and RESULT are files.
    add("--stage", nargs=3, metavar=("NAME", "TASK", "RESULT"), help=argparse.SUPPRESS)


def check(args: Options) -> None:
    if args.stage:
        return
    folders = [args.target is not None, args.drafter is not None]
    either = all(folders) if args.shape is None else not any(folders)
    refuse(not either, "give either --shape NAME or --target DIR and --drafter DIR")
    meaningless = "--prompts needs a real pair: random weights decode nothing of meaning"
    refuse(args.shape is not None and args.prompts is not None, meaningless)
    random = args.beside is None or args.shape is not None
    refuse(not random, "--beside compares random weights: give --shape")
    if args.shape is not None:
        refuse_unread(
            args, {"max_new_tokens": 256}, "needs a real pair: random weights have no text"
        )
    if not args.prefill:
        refuse_unread(args, {"prefill_chunk": None}, "without --prefill")
    check_shared(args)
    for shape in (name for name in (args.shape, args.beside) if name is not None):
        dense = not model_shape(shape).target.experts
        refuse(
            dense and args.experts_over == "devices",
            f"--experts-over devices: {shape} has no experts",
        )
    shared = args.tensor_parallel != 1
    parts = f"--tensor-parallel {args.tensor_parallel}: give --only-step too"
    refuse(shared and not args.only_step, parts)
    codes = "--quantised is for the random weights of --shape, on one device, without --against"
    refuse(args.quantised and (not args.shape or shared or args.against), codes)
    if args.shape and args.quantised:
        check_quantised(args.shape, args.quantised)
    at_least_1(args, "steps", "repeats", "context", "max_new_tokens", "capacity", "prefill_chunk")
    refuse((args.capacity or 0) % 256, f"--capacity {args.capacity}: a multiple of 256")
    whole = 1 in args.batch and not args.only_step
    idle = args.reference_python != sys.executable and not args.against
    refuse(idle, f"--reference-python {args.reference_python} without --against reference")
    why = "--against reference compares whole cases at --batch 1"
    refuse(args.against and not whole, why)
    timed = "--no-compilation-cache: the command times a new cache for each case"
    refuse(args.no_compilation_cache, timed)
