"""`jflash bench-kernels` of this clone: python scripts/bench_kernels.py --help."""

import tree

tree.run("bench-kernels")
