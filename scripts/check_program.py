"""`jflash check-program` of this clone: python scripts/check_program.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("check-program"))
