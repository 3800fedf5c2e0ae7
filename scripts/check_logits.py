"""`jflash check-logits` of this clone: python scripts/check_logits.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("check-logits"))
