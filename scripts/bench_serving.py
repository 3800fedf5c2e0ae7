"""`jflash bench-serving` of this clone: python scripts/bench_serving.py --help."""

import tree

tree.run("bench-serving")
