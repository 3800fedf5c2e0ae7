"""`jflash bench-loading` of this clone: python scripts/bench_loading.py --help."""

import tree

tree.run("bench-loading")
