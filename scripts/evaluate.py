"""Evaluate a pair on a data set, resumably: `python scripts/evaluate.py --help`."""

import sys

from jflash.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
