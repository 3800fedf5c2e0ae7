"""Decode answers with and without drafts, one by one and in a batch, and count equal ones.

Every answer is compared with plain decoding's at width 1 and batch 64, and the first of these with
plain decoding at batch 1.
"""

from pathlib import Path

from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.values import at_least_1

KEPT = "kept there as it grows, so that a run cut off keeps its counts"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="SOURCE", help="as for generate")
    add("--drafter", required=True, metavar="SOURCE", help="a trained one")
    add("--gsm8k", type=Path, required=True, metavar="FILE", help="records of its test split")
    add("--questions", type=int, metavar="N", help="the first N; default all")
    ones = "plain answers that batch 1 decodes too, default 64"
    add("--anchored", type=int, default=64, metavar="N", help=ones)
    add("--batch", type=int, default=32, metavar="B", help="beside batch 1; default 32")
    add("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    add("--max-new-tokens", type=int, default=256, help="of each prompt, default 256")
    shared_options(parser)


def check(args: Options) -> None:
    at_least_1(args, "questions", "anchored", "batch", "max_new_tokens")
    check_shared(args)
