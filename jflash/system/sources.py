"""Our own sources, as they were when Python began to import them.

`jflash/__init__.py` imports this file before others. A process runs what its files had then, and
whoever edits them while it runs has a process whose code no file tells.
"""

import functools
import hashlib
import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOTS = (PACKAGE, PACKAGE.parent / "pallas_kernels")


def same_paths() -> dict[str, str]:
    """PYTHONPATH for a process that shall import this jflash, whether it is installed or not.

    Such a process takes `python -P`, or a jflash of the folder it runs in comes first.
    """
    return {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path)}


def _files() -> list[Path]:
    found = (file for root in ROOTS for file in root.rglob("*.py"))
    return sorted(file for file in found if file.name[0] != ".")  # an editor's own


def _look() -> list[tuple]:
    """What changes with a file: its inode's time does even where another time was put back.

    Nothing if one cannot be looked at, or there are none.
    """
    try:
        found = [(file, file.stat()) for file in _files()]
    except OSError:
        return []
    return [(f, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for f, s in found]


_BEGAN = _look()


def digest() -> str | None:
    """A digest of all files of the package and of the kernels; None if one has changed since."""
    try:
        text = _digest()
    except OSError:  # a file that is there no more
        return None
    return text if _BEGAN and _look() == _BEGAN else None


@functools.cache
def _digest() -> str:
    whole = hashlib.sha256()
    for file in _files():
        data = file.read_bytes()
        place = file.relative_to(ROOTS[0].parent)
        whole.update(f"{place} {len(data)}\n".encode() + data)
    return whole.hexdigest()
