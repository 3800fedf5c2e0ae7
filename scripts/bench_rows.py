"""`jflash bench-rows` of this clone: python scripts/bench_rows.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("bench-rows"))
