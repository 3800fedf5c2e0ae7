"""`jflash benchmark` of this clone: python scripts/benchmark.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("benchmark"))
