"""`jflash eval-gsm8k` of this clone: python scripts/eval_gsm8k.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("eval-gsm8k"))
