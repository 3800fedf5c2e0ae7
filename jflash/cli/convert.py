"""convert: any checkpoint that loads, written in Orbax form with its companions."""

import sys

from jflash.cli.command import Options
from jflash.io import convert_checkpoint


def run(options: Options) -> None:
    # On a full disk tensorstore still calls back into an event loop that Orbax has closed, and
    # Python would print an ignored exception below the one line that matters.
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        o = options
        convert_checkpoint(o.source, o.destination, o.dtype, overwrite=o.overwrite)
    finally:
        sys.unraisablehook = before
    print(f"wrote {options.destination}")
