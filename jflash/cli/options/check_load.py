"""Compare texts under load with the same texts alone, bit for bit.

Requests of all kinds come at random beside cancelled ones, in few pages. Each text, its end and its
logprobs must be plain decoding's at batch 1. The exit code is 1 if one differs.
"""

import argparse

from jflash.cli.command import Parser
from jflash.cli.options.values import at_least_1
from jflash.embedded import EMBEDDED_PAIR

KEPT = "kept there"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--target", default=str(EMBEDDED_PAIR / "target"), metavar="SOURCE", help="as for generate")
    add("--drafter", default=str(EMBEDDED_PAIR / "drafter"), metavar="SOURCE", help="likewise")
    add("--requests", type=int, default=500, metavar="N", help="default 500")
    add("--batch", type=int, default=4, metavar="B", help="requests at once, default 4")
    add("--context", type=int, default=256, metavar="N", help="tokens of a request, default 256")
    add("--pages", type=int, default=6, metavar="N", help="of 64 tokens, default 6: very few")
    add("--seed", type=int, default=0, help="of requests and arrivals, default 0")


def check(args: argparse.Namespace) -> None:
    """ValueError for what is wrong before anything is read."""
    at_least_1(args, "requests", "batch", "context", "pages")
