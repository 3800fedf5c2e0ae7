"""Write a checkpoint in Orbax form: `python scripts/convert_checkpoint.py --help`."""

import sys

from jflash.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
