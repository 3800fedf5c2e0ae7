"""Errors of libraries that read and write a checkpoint: tokenizers, chat templates, Orbax."""

import re
from pathlib import Path
from types import TracebackType

MOST_SHOWN = 300  # characters of a library's message
# tensorstore ends its errors with notes for programmers: a number, all its settings, its source.
NOTES = re.compile(r" \[(?:os_error_code|tensorstore_spec|source locations)=")
POINTER = b"version https://git-lfs.github.com/spec/"  # what a clone without Git LFS has


class named:
    """Turns any exception of the block into a ValueError of one line that begins with `what`.

    A template may divide by zero, and a tokenizer's file may make its Rust code panic: foreign data
    decides which exception comes. A MemoryError passes through. A server decodes in such a block
    for each step, and a generator for it would take longer than that.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, MemoryError):
            return
        # pyo3's derives from BaseException.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{self._what}: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """An error's text in one line, with its type if the text is short."""
    text = " ".join(str(error).split())[:MOST_SHOWN]
    return text if " " in text else f"{type(error).__name__} {text}".strip()


def without_notes(text: str) -> str:
    """The text of an error of tensorstore, which ends with the reason."""
    return NOTES.split(text)[0]


def refuse_pointer(file: Path) -> None:
    """ValueError if the file is only the pointer of Git LFS to it."""
    if not file.is_file():
        return
    with file.open("rb") as begun:
        if begun.read(len(POINTER)) == POINTER:
            raise ValueError(f"{file} is only a pointer of Git LFS: git lfs pull brings the file")
