"""CRC-32 of every file of a converted checkpoint, because Orbax's arrays have no checksums.

The sums are written on conversion. Other threads compare them while the checkpoint loads, so that
reading waits only for the last file. A checkpoint without the list is loaded as it is.
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
    sums = {_name(file, folder): _sum_of(file) for file in _files(folder)}
    _list_of(folder).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def check_small_files(folder: Path) -> None:
    """ValueError if a small file below `folder`, such as metadata, is not what was written.

    Orbax must not see damaged metadata: its threads go on after its error, and print theirs.
    """
    expected = _listed(folder)
    small = [file for file in _files(folder) if file.stat().st_size <= PIECE]
    sums = {_name(file, folder): _sum_of(file) for file in small}
    _refuse(folder, [name for name in sums if sums[name] != expected.get(name, sums[name])])


@contextlib.contextmanager
def compared(folder: Path) -> Iterator[None]:
    """Sums the files below `folder` while the block reads them; ValueError for one that differs."""
    expected = _listed(folder)
    there = {_name(file, folder): file for file in _files(folder)}
    pool = ThreadPoolExecutor(THREADS)
    try:
        sums = {name: pool.submit(_sum_of, there[name]) for name in expected if name in there}
        yield
        read = {name: future.result() for name, future in sums.items()}
    finally:
        pool.shutdown(cancel_futures=True)
    _refuse(folder, [name for name in expected if read.get(name) != expected[name]])


def _refuse(folder: Path, damaged: list[str]) -> None:
    if damaged:
        raise ValueError(
            f"{folder} is corrupt: {', '.join(damaged[:3])} changed since it was converted"
        )


def _listed(folder: Path) -> dict[str, int]:
    return read_json(_list_of(folder)) if _list_of(folder).is_file() else {}


def _name(file: Path, folder: Path) -> str:
    return str(file.relative_to(folder))


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
