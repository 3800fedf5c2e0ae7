"""Measure tokens a second by the rows that a step verifies: chosen, fixed or plain.

The engine decodes records of data sets greedily with a real pair.
"""

from pathlib import Path

from jflash.cli.command import Options, Parser
from jflash.cli.options.values import at_least_1, counts

KEPT = "kept there row by row, so that a run cut off keeps its rows"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="SOURCE", help="as for generate")
    add("--drafter", required=True, metavar="SOURCE")
    add("--gsm8k", type=Path, metavar="FILE", help="records of GSM8K's test split")
    add("--mt-bench", type=Path, metavar="FILE", help="questions of MT-Bench")
    add("--batch", type=counts, default=(8, 32, 64), metavar="8,32", help="default 8,32,64")
    add("--widths", type=counts, default=(4, 8, 16), metavar="4,8", help="default 4,8,16")
    add("--answers", type=int, default=3, metavar="N", help="of each slot, default 3")
    add("--rounds", type=int, default=2, help="the fastest counts, default 2")
    add("--max-new-tokens", type=int, default=256, help="of each prompt, default 256")


def check(args: Options) -> None:
    if args.gsm8k is None and args.mt_bench is None:
        raise ValueError("nothing to decode: give --gsm8k FILE, --mt-bench FILE or both")
    at_least_1(args, "answers", "rounds", "max_new_tokens")
