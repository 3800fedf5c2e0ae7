"""`jflash convert` of this clone: python scripts/convert_checkpoint.py --help."""

import tree

tree.run("convert")
