"""The options of convert."""

import argparse
from pathlib import Path

from jflash.cli.command import Parser


def make_parser(prog: str = "convert_checkpoint.py") -> Parser:
    parser = Parser(prog, "Write a target or a drafter as an Orbax checkpoint.")
    parser.add_argument(
        "source", metavar="SRC", help="a folder in either form, a .gguf file or a hub id"
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    return parser


def check(options: argparse.Namespace) -> None:
    """Nothing: what SRC and DST are is a matter of what lies there."""
