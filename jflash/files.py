"""Files that appear whole or not at all, lines of JSON, and the lock of a running command."""

import contextlib
import fcntl
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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


@contextlib.contextmanager
def locked(file: Path, what: Path) -> Iterator[None]:
    """Holds a lock on `file`, which is made if need be; the system frees it if the process dies.

    ValueError, naming `what` it guards, while another process holds it.
    """
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{what} is in use by another process: wait for its end, or give another place"
            ) from None
        yield


def json_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, of a .gz too, each with its place, 'FILE:LINE', for errors about it.

    ValueError for a file that cannot be read, and naming a line that is no object.
    """
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a JSON object: {line.strip()[:40]}")
        found.append((where, record))
    return found
