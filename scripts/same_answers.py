"""`jflash same-answers` of this clone: python scripts/same_answers.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("same-answers"))
