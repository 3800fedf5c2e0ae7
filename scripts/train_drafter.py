"""`jflash train` of this clone: python scripts/train_drafter.py --help."""

import tree

tree.run("train")
