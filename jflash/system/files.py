"""Files that appear whole or not at all, and lines of JSON.

Only this file writes such files, so no reader ever sees half of one.
"""

import contextlib
import glob
import gzip
import itertools
import json
import math
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jflash.system.locks import naming, sole_writer

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
        with _becoming(path, place) as part:
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
def _becoming(path: Path, part: Path) -> Iterator[Path]:
    try:
        yield part
        part.rename(path)
    finally:
        with contextlib.suppress(OSError):  # the error before it says more
            part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    """The place of the only process that may write `path`; so what a killed one left is found."""
    return path.with_name(f".{path.name}.part")


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


@contextlib.contextmanager
def whole_file(path: Path, overwrite: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a line; `path` appears when the block ends well.

    Until then the lines are in a file beside it. ValueError, mostly on entering, if `path` cannot
    be written, or while another process writes it; an existing file needs `overwrite`.
    """
    with (
        _only_writer(path, overwrite) as path,
        _becoming(path, _part(path)) as part,
        _lines(path, part) as add,
    ):
        yield add


@contextlib.contextmanager
def kept_lines(
    path: Path, overwrite: bool, say: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """As `whole_file`; but lines that were written before the block failed are kept beside `path`.

    So are those of a process that was killed in its block: the next block finds them. `say` gets
    the line that names the place, PATH.unfinished or a numbered one where that is taken. ValueError
    too where an earlier run left such lines, without `overwrite`.
    """
    with _only_writer(path, overwrite) as path:
        first = next(_unfinished(path))
        if overwrite or not first.exists():
            with naming(path):
                killed = _keep(path)
            if killed and overwrite:  # else the error says it
                say(_kept(killed))
        if first.exists() and not overwrite:
            raise ValueError(f"{_kept(first)}: move it, or pass --overwrite")
        with _becoming(path, _part(path)) as part:
            try:
                with _lines(path, part) as add:
                    yield add
            except BaseException:
                with contextlib.suppress(OSError):  # the error before it says more
                    if left := _keep(path):
                        say(_kept(left))
                raise


def check_whole_file(path: Path, overwrite: bool, way: Callable = whole_file) -> None:
    """ValueError if `way`, that or `kept_lines`, could not write `path` now; it leaves nothing."""

    class Enough(Exception):
        pass

    with contextlib.suppress(Enough), way(path, overwrite):
        raise Enough


@contextlib.contextmanager
def _only_writer(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yields `path` without links, where this block alone may write a file; else ValueError."""
    _check_file(path, overwrite)
    path = path.resolve()
    with sole_writer(path):
        _check_file(path, overwrite)  # another process may have ended in between
        yield path


def _check_file(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: results are written beside it and renamed")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: pass --overwrite to replace it")


@contextlib.contextmanager
def _lines(path: Path, part: Path, mode: str = "w") -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a line to `part`; its errors name `path`."""
    with naming(path):
        file = part.open(mode, encoding="utf-8")

    def write(line: str) -> None:
        with naming(path):
            file.write(line + "\n")
            file.flush()

    try:
        yield write
        with naming(path):
            file.close()
    finally:
        with contextlib.suppress(OSError):  # a full disc fails the second time too
            file.close()


def _keep(path: Path) -> Path | None:
    """Moves the whole lines of a run that did not end to a free place; None if there are none."""
    part = _part(path)
    end = _whole(part.read_bytes()) if part.exists() else 0
    if not end:
        return None
    os.truncate(part, end)
    return part.rename(next(place for place in _unfinished(path) if not place.exists()))


def _unfinished(path: Path) -> Iterator[Path]:
    """Places for the lines of runs that ended before `path` could appear, the first one first."""
    first = path.with_name(f"{path.name}.unfinished")
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}.{number}")


def _kept(place: Path) -> str:
    return f"{place} has the lines of a run that did not end"


def json_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file or a .gz, each after its place, 'FILE:LINE', for errors about it.

    ValueError for a file that cannot be read, and naming a line that is no object.
    """
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode(UTF_8)
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
            record = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
        except RecursionError:
            raise ValueError(f"{where} is not JSON here: it is nested too deep") from None
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if "\\ud" in line.lower():
            check_characters(record, where)
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a JSON object: {line.strip()[:40]}")
        found.append((where, record))
    return found


def check_characters(value: Any, where: str) -> None:
    """ValueError for JSON with half a character, which no tokenizer and no file takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not valid UTF-8: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(number: str) -> float:
    """The number; a larger one than floats hold would be infinite, and no line could keep it."""
    if math.isinf(float(number)):
        raise ValueError(f"{number:.40} is too large a number")
    return float(number)


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
            why = f"{file} line {number} is broken: {error}"
            anew = "the command that wrote the file makes a line anew that is removed"
            raise ValueError(f"{why}; {anew}") from None
    return records


def _whole(data: bytes) -> int:
    """The end of the last whole line."""
    return data.rfind(b"\n") + 1


@contextlib.contextmanager
def appended(file: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that adds a record; when it returns, the system holds the line.

    The line that a killed run did not finish is cut off, so the caller must hold the folder's lock.
    """
    with naming(file), file.open("a+b") as found:
        found.seek(0)
        found.truncate(_whole(found.read()))
    with _lines(file, file, "a") as write:
        yield lambda record: write(json.dumps(record, allow_nan=False))
