"""evaluate.py for GSM8K: `python scripts/eval_gsm8k.py --help`."""

import sys

from jflash.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main(dataset="gsm8k"))
