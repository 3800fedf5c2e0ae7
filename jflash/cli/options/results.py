"""Options of the commands that measure or check: which kernels, and where the result goes."""

import argparse
from pathlib import Path

from jflash.cli.command import Parser
from jflash.cli.options.values import option_name, refuse
from jflash.files import check_whole_file
from jflash.kernels import BACKENDS


def backend_options(parser: Parser) -> None:
    for name in BACKENDS:
        parser.add_argument(option_name(name), metavar="NAME", help="by default jflash chooses")


def chosen_backends(args: argparse.Namespace) -> dict[str, str]:
    """The backends that the command line names."""
    return {name: getattr(args, name) for name in BACKENDS if getattr(args, name) is not None}


def result_options(parser: Parser, kept: str) -> None:
    """--json, whose line of `kept` is printed in any case, and --overwrite."""
    add, text = parser.add_argument, f"the last line, which is printed anyway, {kept}"
    add("--json", type=Path, nargs="?", metavar="FILE", help=text)
    add("--overwrite", action="store_true", help="replace an existing --json")


def check_result(args: argparse.Namespace) -> None:
    """ValueError if the result could not be written; called last, because it looks at the disk."""
    refuse(args.overwrite and args.json is None, "--overwrite without --json")
    if args.json is not None:
        check_whole_file(args.json, args.overwrite)
