"""Decode a prompt with DFlash: `python scripts/generate.py --help`."""

import sys

from jflash.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
