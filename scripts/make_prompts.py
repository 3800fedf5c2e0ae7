"""`jflash make-prompts` of this clone: python scripts/make_prompts.py --help."""

import tree

tree.run("make-prompts")
