"""`jflash bench-steps` of this clone: python scripts/bench_steps.py --help."""

import tree

tree.run("bench-steps")
