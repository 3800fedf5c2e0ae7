"""`jflash check-logits` of this clone: python scripts/check_logits.py --help."""

import tree

tree.run("check-logits")
