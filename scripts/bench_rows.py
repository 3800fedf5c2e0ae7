"""`jflash bench-rows` of this clone: python scripts/bench_rows.py --help."""

import tree

tree.run("bench-rows")
