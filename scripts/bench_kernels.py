"""`jflash bench-kernels` of this clone: python scripts/bench_kernels.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("bench-kernels"))
