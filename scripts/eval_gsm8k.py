"""`jflash eval-gsm8k` of this clone: python scripts/eval_gsm8k.py --help."""

import tree

tree.run("eval-gsm8k")
