"""Compiled programs on disk beside JAX's cache, which are read without being traced.

JAX's cache asks for a program's text, and making that is Python: for an engine at Qwen3-8B's sizes
about as long as compiling. Here a file's name is the digest of all that a program hangs on
(`program_names`), and every file begins with a digest of that and of its contents. So a file of
other sources, sizes, tiles, settings, versions or devices is another file, and one that is cut
short, damaged or moved is none.

To read a program is to run code: files are pickled. They lie in a folder with mode 0700 that must
belong to the user, as must each file; in any other nothing is read or written. Files appear whole
or not at all. All are at most as large as JAX's cache may be, or MOST bytes if that has no bound:
those that were not read for longest go first. What switches JAX's cache off, or moves it, does so
with this one. It is used where a GPU is a process's only device.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental import serialize_executable

from jflash.compiled.program_names import name_of
from jflash.compiled.tiles import prefer_kept, settled
from jflash.system.files import write_bytes

FOLDER = "programs"  # in that of JAX's cache
MOST = 4 * 2**30
MARK = 32  # bytes at a file's beginning
HIT = "/jax/compilation_cache/cache_hits"  # the event of jax.monitoring
_thread = threading.local()


def _listen(event: str, **_: Any) -> None:
    """An event comes in the thread that compiles."""
    if event == HIT:
        _thread.hit = True


jax.monitoring.register_event_listener(_listen)


def compiling(
    submit: Callable[..., Future], lower: Callable[..., jax.stages.Lowered], *given: Any
) -> Future:
    """The executable of lower(*given), which `submit` has read or compiled by another thread.

    `lower` is a function of a module of ours, and makes the program from its arguments alone.
    """
    folder = _folder() if _suits() else None
    if folder is not None:
        prefer_kept()
    name = name_of(lower, given) if folder else None
    if folder is None or name is None:
        return submit(settled(functools.partial(lower, *given)).compile)
    file = folder / hashlib.sha256(name.encode()).hexdigest()
    data = _read(file, name)
    if data is not None:
        return submit(_loaded, data, file, name, lower, given)
    lowered = settled(functools.partial(lower, *given))
    if name_of(lower, given) != name:  # tiles were timed meanwhile, or sources edited
        return submit(lowered.compile)
    return submit(_compiled, lowered, file, name)


def _suits() -> bool:
    return jax.default_backend() == "gpu" and jax.device_count() == 1


def _most() -> int:
    bound = jax.config.jax_compilation_cache_max_size
    return MOST if bound < 0 else bound


def _folder() -> Path | None:
    """The user's own folder; None without one, or if programs are not to be kept."""
    above = jax.config.jax_compilation_cache_dir
    if not above or "://" in above or not jax.config.jax_enable_compilation_cache or not _most():
        return None
    folder = Path(above) / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if private and found.st_uid == os.geteuid():
        return folder
    _say(f"{folder} is not this user's alone: programs are traced in every process")
    return None


@functools.cache
def _say(line: str) -> None:
    """Prints a line on stderr, once in a process."""
    print(line, file=sys.stderr)


def _mark(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + data).digest()


def _read(file: Path, name: str) -> bytes | None:
    """What `_compiled` has written for this name, if it is there, whole and the user's."""
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            data = opened.read()
        os.utime(file)  # the least recently read ones go first
    except OSError:
        return None
    return data[MARK:] if data[:MARK] == _mark(name, data[MARK:]) else None


def _loaded(data: bytes, file: Path, name: str, lower: Callable, given: tuple) -> Any:
    try:
        return serialize_executable.deserialize_and_load(*pickle.loads(data))
    except Exception:  # of any kind: a device that takes this program no more, say
        # A name is given only where all threads trace alike.
        return _compiled(settled(functools.partial(lower, *given)), file, name)


def _compiled(lowered: Any, file: Path, name: str) -> Any:
    _thread.hit = False
    compiled = lowered.compile()
    if _thread.hit:  # what is serialised again may lack parts: on a CPU it fails when it runs
        return compiled
    try:
        data = pickle.dumps(serialize_executable.serialize(compiled))
    except Exception:  # of any kind: what has no such form, as one with constants, is not kept
        return compiled
    with contextlib.suppress(OSError):  # a full disk, say
        write_bytes(file, _mark(name, data) + data)
        _make_room(file.parent)
    return compiled


def _make_room(folder: Path) -> None:
    """Removes what exceeds the bound, and with time what a killed process did not finish."""
    total, found = 0, []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another process has removed it
            found.append((file.stat(), file))
    for status, file in sorted(found, key=lambda x: x[0].st_mtime, reverse=True):
        total += status.st_size
        if total > _most():
            file.unlink(missing_ok=True)
