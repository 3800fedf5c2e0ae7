"""The place of the embedded pair, which comes with the package.

In the tree jflash/data holds a link to checkpoints/tiny-math, so that each file is kept once; an
installed package holds the files themselves.
"""

from importlib.resources import files
from pathlib import Path

_DATA = Path(str(files("jflash"))) / "data"
EMBEDDED_PAIR = _DATA / "tiny-math"  # holds target and drafter
