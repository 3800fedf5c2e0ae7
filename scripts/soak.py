"""`jflash soak` of this clone: python scripts/soak.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("soak"))
