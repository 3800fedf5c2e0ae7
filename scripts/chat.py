"""`jflash chat` of this clone: python scripts/chat.py --help."""

import tree

tree.run("chat")
