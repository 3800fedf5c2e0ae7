"""`jflash soak` of this clone: python scripts/soak.py --help."""

import tree

tree.run("soak")
