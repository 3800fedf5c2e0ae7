"""Files of lines, as they are written: whole, kept where a run fails, or one record after another.

A process that is killed in a line leaves half of it, which no reader takes.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jflash.system.files import becoming
from jflash.system.locks import naming, sole_writer


@contextlib.contextmanager
def whole_file(path: Path, overwrite: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a line; `path` appears when the block ends well.

    Until then the lines are in a file beside it. ValueError, mostly on entering, if `path` cannot
    be written, or while another process writes it; an existing file needs `overwrite`.
    """
    with (
        _only_writer(path, overwrite) as path,
        becoming(path, _part(path)) as part,
        _lines(path, part) as add,
    ):
        yield add


@contextlib.contextmanager
def newest_line(path: Path, overwrite: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes `path` as a whole file of one line, over the one before.

    No other process writes it until the block ends. ValueError as of `whole_file`.
    """
    with _only_writer(path, overwrite) as path:

        def write(line: str) -> None:
            with becoming(path, _part(path)) as part, _lines(path, part) as add:
                add(line)

        yield write


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
        with becoming(path, _part(path)) as part:
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


def _part(path: Path) -> Path:
    """The place of the only process that may write `path`; so what a killed one left is found."""
    return path.with_name(f".{path.name}.part")


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
