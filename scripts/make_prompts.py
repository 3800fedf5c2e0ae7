"""`jflash make-prompts` of this clone: python scripts/make_prompts.py --help."""

import sys

import tree

if __name__ == "__main__":
    sys.exit(tree.run("make-prompts"))
