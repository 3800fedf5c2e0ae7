"""`jflash serve` of this clone: python scripts/serve.py --help."""

import tree

tree.run("serve")
