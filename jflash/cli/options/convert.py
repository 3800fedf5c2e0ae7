"""Write a target or a drafter as an Orbax checkpoint."""

from pathlib import Path

from jflash.cli.command import Options, Parser


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder in either form, a .gguf file or a hub id")
    add("destination", metavar="DST", type=Path, help="the folder to write")
    add("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    add("--overwrite", action="store_true", help="replace a converted checkpoint at DST")


def check(options: Options) -> None:
    """Refuses nothing: only what lies at SRC and DST decides."""
