"""Files that appear whole or not at all. Knows no format."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a place beside `path` to write to; it becomes `path` if the block ends well.

    If not, what was written is gone and `path` is as it was.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
