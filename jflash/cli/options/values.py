"""What the value of an option may be: lists, seeds and counts, each read in one place."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jflash.records.kernels import AUTO


def _listed(text: str, kind: Callable[[str], Any], what: str) -> list[Any]:
    try:
        return [kind(piece) for piece in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {what}") from None


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 up out of "1,8,32": each once, ascending."""
    return tuple(sorted(set(_listed(text, _count, "numbers from 1 up, such as 1,8,32"))))


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def decimals(text: str) -> tuple[float, ...]:
    """Numbers out of "0,0.7", in their order."""
    return tuple(_listed(text, float, "numbers such as 0,0.7"))


def ids(text: str) -> list[int]:
    """Ids out of "1,2,3", in their order; the model decides whether they exist."""
    return _listed(text, int, "ids such as 1,2,3") if text.strip() else []


def rows(text: str) -> int | str:
    """A number of rows or 'auto'."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def check_seed(value: int) -> int:
    """A seed that JAX's keys can hold."""
    refuse(not 0 <= value < 2**32, f"seed {value} must be within 0 … {2**32 - 1}")
    return value


def at_least_1(options: argparse.Namespace, *names: str) -> None:
    """ValueError for the first of these options that is 0 or less; one that is not set passes."""
    for name in names:
        value = getattr(options, name)
        refuse(value is not None and value < 1, f"{option_name(name)} {value}: at least 1")


def refuse_unread(options: argparse.Namespace, usual: dict[str, Any], why: str) -> None:
    """ValueError for the first of these options that has another value than its usual one."""
    for name, value in usual.items():
        refuse(getattr(options, name) != value, f"{option_name(name)} {why}")


def option_name(name: str) -> str:
    """The option that argparse stores as `name`."""
    return f"--{name.replace('_', '-')}"


def refuse(wrong: object, why: str) -> None:
    """ValueError with the reason if something is wrong."""
    if wrong:
        raise ValueError(why)


def refuse_missing(file: Path) -> None:
    """ValueError unless the file is there, and can be read more than once."""
    refuse(not file.exists(), f"{file}: no such file")
    refuse(not file.is_file(), f"{file} is a folder or a pipe: give a file")


def refuse_replacing(output: Path, source: Path) -> None:
    """ValueError if the file to write is one that is read, by whatever path."""
    same = output.exists() and source.exists() and output.samefile(source)
    refuse(same, f"--output {output} would replace {source}, which is read: give another file")


def refuse_below_file(output: Path) -> None:
    """ValueError if the path of what is written leads through a file, before any work is done."""
    for place in output.parents:
        file = place.exists() and not place.is_dir()
        refuse(file, f"--output {output}: {place} is a file, no folder: give another path")


def refuse_unwritable(output: Path) -> None:
    """ValueError if no folder can be made where this one is to lie, or in it; it leaves none."""
    path = Path(os.path.realpath(output))
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".jflash-", dir=place)).rmdir()
    except OSError as error:
        raise ValueError(f"--output {output}: {place} takes no file: {error.strerror}") from None
