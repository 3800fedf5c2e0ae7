"""Files that appear whole or not at all, so that no reader ever sees half of one."""

import contextlib
import glob
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What is read: the mark that some editors write before a text is no part of it.
UTF_8 = "utf-8-sig"
OWN = 16  # digits in the name of a process's own place
FORGOTTEN = 24 * 3600.0  # seconds after the last write to it


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a block a place beside `path` to write to; it becomes `path` if the block ends well.

    If not, it is removed and `path` stays as it was. Several processes may write it at once, each
    in a place of its own: the last one's stays. An OSError about that place names `path`.
    """
    _remove_forgotten(path)
    place = path.with_name(f".{path.name}.{secrets.token_hex(OWN // 2)}.part")
    try:
        with becoming(path, place) as part:
            yield part
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(place)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _remove_forgotten(path: Path) -> None:
    """Removes places of killed processes: nothing was written there for a day."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * OWN}.part"):
        with contextlib.suppress(OSError):  # another process removes it too
            if time.time() - part.stat().st_mtime > FORGOTTEN:
                part.unlink()


@contextlib.contextmanager
def becoming(path: Path, part: Path) -> Iterator[Path]:
    """`part` becomes `path` if the block ends well, and is removed if not."""
    try:
        yield part
        part.rename(path)
    finally:
        with contextlib.suppress(OSError):  # the error before it says more
            part.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Makes a folder that is missing, and with it those above; of a link the one that it names."""
    folder.resolve().mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file that its owner alone may read, whole, or leaves it unchanged.

    Several processes may write it at once: the last one's stays.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole, or leaves it unchanged."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes a value as a file whole, or leaves it unchanged."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """What `write_json` wrote; ValueError, naming the file, if something damaged it."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, and no JSON: {error}") from None
