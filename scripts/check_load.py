"""`jflash check-load` of this clone: python scripts/check_load.py --help."""

import tree

tree.run("check-load")
