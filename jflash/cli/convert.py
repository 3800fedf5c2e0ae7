"""convert: any checkpoint that loads, written in Orbax form with its companions."""

import argparse
import sys

from jflash.io import convert_checkpoint


def run(options: argparse.Namespace) -> None:
    # When a disc is full, tensorstore still calls back into an event loop that Orbax has closed;
    # Python would print that as an ignored exception below the one line that matters.
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        convert_checkpoint(
            options.source, options.destination, options.dtype, overwrite=options.overwrite
        )
    finally:
        sys.unraisablehook = before
    print(f"wrote {options.destination}")
