"""Write a checkpoint in Orbax form: `python scripts/convert_checkpoint.py --help`."""

import sys

from jflash.cli.convert import main

if __name__ == "__main__":
    # When a disc is full, tensorstore still calls back into an event loop that Orbax has closed;
    # Python would print that as an ignored exception below the one line that matters.
    sys.unraisablehook = lambda _: None
    sys.exit(main())
