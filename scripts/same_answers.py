"""`jflash same-answers` of this clone: python scripts/same_answers.py --help."""

import tree

tree.run("same-answers")
