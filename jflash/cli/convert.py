"""convert: any checkpoint that loads, written in Orbax form with its companions."""

from jflash.cli.command import Options
from jflash.io import convert_checkpoint


def run(options: Options) -> None:
    o = options
    convert_checkpoint(o.source, o.destination, o.dtype, overwrite=o.overwrite)
    print(f"wrote {options.destination}")
