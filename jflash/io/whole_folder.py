"""A folder that appears whole or not at all, even while a failed save still writes into it."""

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from jflash.locks import naming, sole_writer

QUIET, LONGEST = 0.5, 10.0  # seconds without a late write until a failed save is over, at most


def write_whole(destination: Path, overwrite: bool, fill: Callable[[Path], None]) -> None:
    """Fills a folder beside `destination` and renames it when whole; nothing half-written stays.

    What a killed process left there is removed. ValueError if `destination` exists and `overwrite`
    is not set, or cannot be written, or while another process writes it, whose part then stays.
    """
    place = destination.resolve()
    made = [folder for folder in place.parents if not folder.exists()]
    try:
        with naming(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(place):
            check_destination(destination, overwrite)  # not sooner: another process may have ended
            _write(place, fill)
    except BaseException:
        for folder in made:  # the innermost first; one that is no longer empty stays
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _write(destination: Path, fill: Callable[[Path], None]) -> None:
    part = destination.with_name(f".{destination.name}.part")
    old = destination.with_name(f".{destination.name}.old")
    try:
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            fill(part)
            _swap(part, destination, old)
        except BaseException:
            _remove(part)
            raise
    except (OSError, ValueError) as error:
        # tensorstore's "no space left" is a ValueError with all its settings at the end.
        reason = str(error).split(" [tensorstore_spec=")[0]
        raise ValueError(f"cannot write {destination}: {reason}") from error


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
    if not destination.exists():
        part.rename(destination)
        return
    shutil.rmtree(old, ignore_errors=True)
    destination.rename(old)
    try:
        part.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
