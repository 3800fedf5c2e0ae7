"""A file of results that is there whole or not at all."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path, overwrite: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function that writes a line; `path` appears when the block ends well.

    The lines are in a file beside it till then. ValueError, most of them on entering, if `path`
    cannot be written; an existing file needs `overwrite`.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: results are written beside it and renamed")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: pass --overwrite to replace it")
    path = path.resolve()
    part = path.with_name(f".{path.name}.part")
    try:
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
                part.rename(path)
        finally:
            with contextlib.suppress(OSError):  # a full disc fails the second time too
                file.close()
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def keep_newest(path: Path | None, lines: Iterable[str]) -> str:
    """The last of `lines`; each as it comes takes the place of `path`'s content, if there is one.

    A run that is cut off so leaves what it had.
    """
    line = ""
    for line in lines:
        if path is not None:
            with whole_file(path, overwrite=True) as write:
                write(line)
    return line


def check_whole_file(path: Path, overwrite: bool) -> None:
    """ValueError if `whole_file` could not write `path` now; writes and leaves nothing."""

    class Enough(Exception):
        pass

    with contextlib.suppress(Enough), whole_file(path, overwrite):
        raise Enough


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Says which file could not be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
