"""`jflash convert` of this clone: python scripts/convert_checkpoint.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("convert"))
