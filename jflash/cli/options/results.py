"""Options of the commands that measure or check: which kernels, and where the result goes."""

import argparse
from pathlib import Path

from jflash.cli.command import Parser
from jflash.cli.options.values import refuse
from jflash.kernels import BACKENDS


def backend_options(parser: Parser) -> None:
    for name in BACKENDS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="NAME", help="by default jflash's own choice"
        )


def asked_backends(args: argparse.Namespace) -> dict[str, str]:
    """The backends that the command line names."""
    return {name: getattr(args, name) for name in BACKENDS if getattr(args, name) is not None}


def result_options(parser: Parser, kept: str) -> None:
    """--json, whose line of `kept` is printed in any case, and --overwrite."""
    parser.add_argument(
        "--json", type=Path, nargs="?", metavar="FILE",
        help=f"the last line, which is printed anyway, {kept}",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --json")


def check_result(args: argparse.Namespace) -> None:
    refuse([(args.overwrite and args.json is None, "--overwrite without --json")])
