"""Files that appear whole or not at all, lines of JSON, and the locks of running commands.

Only this file writes such files, so no reader ever sees half of one.
"""

import contextlib
import fcntl
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a place beside `path` to write to; it becomes `path` if the block ends well.

    If not, it is removed and `path` stays as it was.
    """
    part = _part(path)
    try:
        yield part
        part.rename(path)
    finally:
        with contextlib.suppress(OSError):  # the error before it says more
            part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


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


@contextlib.contextmanager
def whole_file(path: Path, overwrite: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a line; `path` appears when the block ends well.

    Until then the lines are in a file beside it. ValueError, mostly on entering, if `path` cannot
    be written; an existing file needs `overwrite`.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: results are written beside it and renamed")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: pass --overwrite to replace it")
    path = path.resolve()
    with replacing(path) as part:
        with _named(path):
            file = part.open("w", encoding="utf-8")

        def write(line: str) -> None:
            with _named(path):
                file.write(line + "\n")
                file.flush()

        try:
            yield write
            with _named(path):
                file.close()
        finally:
            with contextlib.suppress(OSError):  # a full disc fails the second time too
                file.close()


def unfinished(path: Path) -> Path:
    """Where the lines are that were written before `path` could appear."""
    return path.with_name(f"{path.name}.unfinished")


@contextlib.contextmanager
def kept_lines(path: Path, overwrite: bool) -> Iterator[Callable[[str], None]]:
    """As `whole_file`; but lines that the block wrote before it failed are in `unfinished(path)`.

    ValueError too where an earlier run left such lines, without `overwrite`.
    """
    path = path.resolve()
    left, written = unfinished(path), 0
    if left.exists() and not overwrite:
        raise ValueError(
            f"{left} has the lines of a run that did not end: move it, or pass --overwrite"
        )
    with whole_file(path, overwrite) as write:

        def counted(line: str) -> None:
            nonlocal written
            write(line)
            written += 1

        try:
            yield counted
        except BaseException:
            if written:
                with contextlib.suppress(OSError):
                    part = _part(path)
                    os.truncate(part, _whole(part.read_bytes()))
                    part.rename(left)
            raise


def check_whole_file(path: Path, overwrite: bool, way: Callable = whole_file) -> None:
    """ValueError if `way`, that or `kept_lines`, could not write `path` now; it leaves nothing."""

    class Enough(Exception):
        pass

    with contextlib.suppress(Enough), way(path, overwrite):
        raise Enough


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(file: Path, what: Path) -> Iterator[None]:
    """Holds a lock on `file`, which is created if missing; the system frees it with the process.

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


@contextlib.contextmanager
def in_turn(file: Path | None) -> Iterator[Callable[[], None]]:
    """Yields a function that waits until no other process is in a block of this file.

    From its return on, other processes wait where their blocks begin, until this one ends; before
    that, blocks run beside each other. Without a file nobody waits.
    """
    if file is None:
        yield lambda: None
        return
    with _named(file):
        lock = file.open("a")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield lambda: fcntl.flock(lock, fcntl.LOCK_EX)


def json_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file or a .gz, each after its place, 'FILE:LINE', for errors about it.

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
            record = json.loads(line, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError(f"{where} is not JSON here: it is nested too deep") from None
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if "\\ud" in line.lower():  # half a character, which no tokenizer and no file takes
            try:
                json.dumps(record, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"{where} is not valid UTF-8: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a JSON object: {line.strip()[:40]}")
        found.append((where, record))
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file, if there is one, without a half-written last line.

    The file is only read: another process may be writing it. ValueError for a broken line before
    the last.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    records = []
    for number, line in enumerate(data[: _whole(data)].splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file} line {number} is broken: {error}") from None
    return records


def _whole(data: bytes) -> int:
    """The end of the last whole line."""
    return data.rfind(b"\n") + 1


@contextlib.contextmanager
def appended(file: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that adds a record; when it returns, the system holds the line.

    The line that a killed run did not finish is cut off, so the caller must hold the folder's lock.
    """
    with file.open("a+b") as found:
        found.seek(0)
        found.truncate(_whole(found.read()))
    with file.open("a", encoding="utf-8") as lines:

        def add(record: dict[str, Any]) -> None:
            lines.write(json.dumps(record, allow_nan=False) + "\n")
            lines.flush()

        yield add
