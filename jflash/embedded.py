"""Where the files lie that come with the package: the embedded pair and measured step times.

In the tree jflash/data holds links to checkpoints/tiny-math and benchmarks, so that each file is
kept once; an installed package holds the files themselves.
"""

from importlib.resources import files
from pathlib import Path

_DATA = Path(str(files("jflash"))) / "data"
EMBEDDED_PAIR = _DATA / "tiny-math"  # holds target and drafter
MEASURED = _DATA / "benchmarks"  # results of `jflash benchmark`
