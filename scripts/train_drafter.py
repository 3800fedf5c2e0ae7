"""`jflash train` of this clone: python scripts/train_drafter.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("train"))
