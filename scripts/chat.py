"""`jflash chat` of this clone: python scripts/chat.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("chat"))
