"""`jflash check-lossless` of this clone: python scripts/check_lossless.py --help."""

import tree

tree.run("check-lossless")
