"""`jflash check-lossless` of this clone: python scripts/check_lossless.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("check-lossless"))
