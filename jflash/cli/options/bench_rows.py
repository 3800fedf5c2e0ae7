"""Measure tokens a second by the rows that a step verifies: chosen, fixed or plain.

The engine decodes records of data sets greedily with a real pair.
"""

from pathlib import Path

from jflash.bench.shapes import model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.values import at_least_1, counts, refuse, refuse_unread

KEPT = "kept there row by row, so that a run cut off keeps its rows"


CAPACITY = 2048
MOST = 10**6  # answers, which are all listed before the first is decoded
# What only texts need.
OF_TEXTS = {"widths": (4, 8, 16), "answers": 3, "rounds": 2, "max_new_tokens": 256}


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--target", metavar="SOURCE", help="as for generate")
    add("--drafter", metavar="SOURCE")
    add("--shape", help="random weights of a published shape instead: times of steps, no text")
    slots = f"slots of a shape's sequence, default {CAPACITY}"
    add("--capacity", type=int, default=CAPACITY, help=slots)
    add("--gsm8k", type=Path, metavar="FILE", help="records of GSM8K's test split")
    add("--mt-bench", type=Path, metavar="FILE", help="questions of MT-Bench")
    add("--batch", type=counts, default=(8, 32, 64), metavar="8,32", help="default 8,32,64")
    add("--widths", type=counts, metavar="4,8", help="default 4,8,16")
    add("--answers", type=int, metavar="N", help="of each slot, default 3")
    add("--rounds", type=int, help="the fastest counts, default 2")
    add("--max-new-tokens", type=int, help="of each prompt, default 256")
    parser.set_defaults(**OF_TEXTS)
    shared_options(parser, "the real pair")
    turn = "an empty file: commands that name it compile at once and are timed one after another"
    add("--in-turn", type=Path, metavar="FILE", help=turn)


def check(args: Options) -> None:
    pair, prompts = (args.target, args.drafter), (args.gsm8k, args.mt_bench)
    if args.shape is None:
        refuse(None in pair, "give --shape NAME, or --target SOURCE and --drafter SOURCE")
        why = "nothing to decode: give --gsm8k FILE, --mt-bench FILE or both"
        refuse(prompts == (None, None), why)
        refuse(args.capacity != CAPACITY, f"--capacity {args.capacity} without --shape")
    else:
        refuse(args.tensor_parallel > 1, "--tensor-parallel is for a real pair, not for --shape")
        text = f"--shape {args.shape} decodes no text: leave the pair and its prompts out"
        refuse(any((*pair, *prompts)), text)
        model_shape(args.shape)
        refuse_unread(args, OF_TEXTS, f"with --shape {args.shape}, which decodes no text")
    at_least_1(args, "answers", "rounds", "max_new_tokens")
    check_shared(args)
    all = max(args.batch) * args.answers
    many = f"--answers {args.answers} of {max(args.batch)} slots: at most {MOST} in all"
    refuse(args.shape is None and all > MOST, many)
    refuse(args.capacity < 64 or args.capacity % 64, f"--capacity {args.capacity}: in 64s")
