"""`jflash check-program` of this clone: python scripts/check_program.py --help."""

import tree

tree.run("check-program")
