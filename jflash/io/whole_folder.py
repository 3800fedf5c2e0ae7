"""A folder that appears whole or not at all, even while a failed save still writes into it."""

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from jflash.io.foreign import without_notes
from jflash.system.locks import naming, sole_writer

QUIET, LONGEST = 0.5, 10.0  # seconds without a late write until a failed save is over, at most


def write_whole(destination: Path, overwrite: bool, fill: Callable[[Path], None]) -> None:
    """Fills a folder beside `destination` and renames it when whole; nothing half-written stays.

    What a killed process left there is removed, and what it had moved away comes back first.
    ValueError if `destination` exists and `overwrite` is not set, or cannot be written, or while
    another process writes it, whose part then stays.
    """
    place = destination.resolve()
    made = [folder for folder in place.parents if not folder.exists()]
    try:
        with naming(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(place):
            _take_back(place, overwrite)
            check_destination(destination, overwrite)  # not sooner: another process may have ended
            _write(place, fill)
    except BaseException:
        for folder in made:  # the innermost first; one that is no longer empty stays
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _old(destination: Path) -> Path:
    """Where the content of `destination` is from when it is moved away until it is replaced.

    It is whole there, or not there.
    """
    return destination.with_name(f".{destination.name}.old")


def _take_back(destination: Path, overwrite: bool) -> None:
    """Puts the content back that a process had moved away when it was killed.

    ValueError then, unless it may be replaced.
    """
    old = _old(destination)
    if destination.exists() or not old.exists():
        return
    with naming(destination):
        old.rename(destination)
    if not overwrite:
        why = "a run was killed while it replaced it, and its content is back"
        raise ValueError(f"{destination} exists already: {why}: pass --overwrite to replace it")


def _write(destination: Path, fill: Callable[[Path], None]) -> None:
    part = destination.with_name(f".{destination.name}.part")
    old = _old(destination)
    try:
        try:
            _clear(part, old)
            part.mkdir()
            fill(part)
            _swap(part, destination, old)
            _clear(part, old)
        except BaseException:
            _remove(part)
            raise
    except (OSError, ValueError) as error:
        # tensorstore's "no space left" is a ValueError.
        raise ValueError(f"cannot write {destination}: {without_notes(str(error))}") from error


def _remove(part: Path) -> None:
    """Removes `part`.

    A failed save can leave writes in flight, for which Orbax does not wait: they recreate their
    folders, and on a full disk use the space just freed. So the removal repeats until nothing
    reappears for QUIET seconds.
    """
    begun = last = time.monotonic()
    while (now := time.monotonic()) - last < QUIET and now - begun < LONGEST:
        if part.exists():
            shutil.rmtree(part, ignore_errors=True)
            last = now
        time.sleep(0.02)


def check_destination(destination: Path, overwrite: bool) -> None:
    """ValueError unless a checkpoint may be written there; only a checkpoint is ever replaced.

    Call it before the weights are read.
    """
    try:
        if not destination.exists():
            return
        empty = destination.is_dir() and not any(destination.iterdir())
        if not empty and not (destination / "config.json").exists():
            raise ValueError(f"{destination} exists and is no checkpoint: give another DST")
    except OSError as error:
        raise ValueError(f"cannot write {destination}: {error}") from error
    if not overwrite:
        raise ValueError(f"{destination} exists already: pass --overwrite to replace it")


def _swap(part: Path, destination: Path, old: Path) -> None:
    """Renames `part` to `destination`, which keeps its old content if that fails."""
    if destination.exists():
        destination.rename(old)
    try:
        part.rename(destination)
    except BaseException:
        if old.exists():
            old.rename(destination)
        raise


def _clear(part: Path, old: Path) -> None:
    """Removes both; `old` by the other name, so that half of it is nowhere taken for the whole."""
    shutil.rmtree(part, ignore_errors=True)
    with contextlib.suppress(OSError):  # mostly because it is not there
        old.rename(part)
        shutil.rmtree(part, ignore_errors=True)
