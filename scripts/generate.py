"""`jflash generate` of this clone: python scripts/generate.py --help."""

import tree

tree.run("generate")
