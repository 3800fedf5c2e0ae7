"""`jflash generate` of this clone: python scripts/generate.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("generate"))
