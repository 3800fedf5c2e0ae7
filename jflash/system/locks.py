"""Locks of running commands, which the system frees with their process."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Holds the lock of who writes `path` and what is beside it until it is whole.

    ValueError while another process holds it, or if it cannot be made.
    """
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as held:
        with naming(path):
            held.enter_context(locked(lock, path))
        try:
            yield
        finally:  # while it is held: who waits at the old file finds that it has no name
            with contextlib.suppress(OSError):
                lock.unlink()


@contextlib.contextmanager
def locked(file: Path, what: Path) -> Iterator[None]:
    """Holds a lock on `file`, which is created if missing; the system frees it with the process.

    The holder may remove the file. ValueError, naming `what` it guards, while another process
    holds it.
    """
    held = False
    while not held:
        with file.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{what} is in use by another process: wait for its end, or give another place"
                ) from None
            # The last holder may have removed it since it was opened: then it locks nobody out.
            if held := _names(file, lock.fileno()):
                yield


def _names(file: Path, opened: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def in_turn(file: Path | None) -> Iterator[Callable[[], None]]:
    """Yields a function that waits until no other process is in a block of this file.

    From its return on, other processes wait where their blocks begin, until this one ends; before
    that, blocks run beside each other. Without a file nobody waits.
    """
    if file is None:
        yield lambda: None
        return
    with naming(file):
        lock = file.open("a+")  # NFS shares only what may be read
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield lambda: fcntl.flock(lock, fcntl.LOCK_EX)
