"""`python -m jflash COMMAND …` is the console command `jflash`."""

import sys

from jflash.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
