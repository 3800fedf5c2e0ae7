"""`jflash evaluate` of this clone: python scripts/evaluate.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("evaluate"))
