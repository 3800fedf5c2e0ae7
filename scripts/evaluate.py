"""`jflash evaluate` of this clone: python scripts/evaluate.py --help."""

import tree

tree.run("evaluate")
