"""convert_checkpoint.py: any checkpoint that loads, written in Orbax form with its companions."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jflash.cli.command import Parser, run_command
from jflash.io import convert_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 after one line about a bad input."""
    parser = Parser("convert_checkpoint.py", "Write a target or a drafter as an Orbax checkpoint.")
    parser.add_argument(
        "source", metavar="SRC", help="a folder in either form, a .gguf file or a hub id"
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    return run_command(parser, _run, argv)


def _run(options: argparse.Namespace) -> None:
    convert_checkpoint(
        options.source, options.destination, options.dtype, overwrite=options.overwrite
    )
    print(f"wrote {options.destination}")
