"""CRC-32 of every file of a converted checkpoint: Orbax's arrays carry none of their own.

Written when it is converted, compared while it loads: by other threads, so that reading waits for
nothing but the last file. A checkpoint without the list is loaded as it is.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jflash.io.hf_config import read_json

PIECE = 2**22  # bytes summed at a time
THREADS = 8
SUFFIX = ".crc32.json"  # beside the folder that it describes


def write_checksums(folder: Path) -> None:
    """Lists the sums of all files below `folder`, in a file beside it."""
    sums = {str(file.relative_to(folder)): _sum_of(file) for file in _files(folder)}
    _list_of(folder).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def compared(folder: Path) -> Iterator[None]:
    """Sums the files below `folder` while the block reads them; ValueError for one that differs."""
    expected = read_json(_list_of(folder)) if _list_of(folder).is_file() else {}
    there = {str(file.relative_to(folder)): file for file in _files(folder)}
    pool = ThreadPoolExecutor(THREADS)
    try:
        sums = {name: pool.submit(_sum_of, there[name]) for name in expected if name in there}
        yield
        found = {name: future.result() for name, future in sums.items()}
        damaged = [name for name in expected if found.get(name) != expected[name]]
    finally:
        pool.shutdown(cancel_futures=True)
    if damaged:
        raise ValueError(
            f"{folder} is corrupt: {', '.join(damaged[:3])} changed since it was converted"
        )


def _list_of(folder: Path) -> Path:
    return folder.with_name(folder.name + SUFFIX)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _sum_of(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            total = zlib.crc32(piece, total)
    return total
