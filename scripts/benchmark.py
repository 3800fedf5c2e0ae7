"""`jflash benchmark` of this clone: python scripts/benchmark.py --help."""

import tree

tree.run("benchmark")
