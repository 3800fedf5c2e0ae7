"""`jflash serve` of this clone: python scripts/serve.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("serve"))
