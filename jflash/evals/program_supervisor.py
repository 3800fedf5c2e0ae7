"""Runs one program under limits and ends everything that it started: the main of a process.

`python -I program_supervisor.py PROGRAM LIMITS` runs PROGRAM in the current folder; LIMITS is JSON.
Orphans of the program become children of this process, so that none escapes by starting a session.
It runs on Linux, and imports only the standard library because it must start quickly.
"""

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PASSED, FAILED, TIMEOUT = 0, 1, 2  # exit codes
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LOOK_SECONDS = 0.05  # between two looks at what the program's processes take
END_SECONDS = 5.0  # until all of them must be gone
MOST_FILES = 10_000
FORKS_BESIDE = 256  # processes and threads that this user may start elsewhere meanwhile

# The program's process limits itself before it reads a line of the program. It sets no limit on the
# user's processes if processes that it cannot see (another container's) have reached it already.
# The program is not __main__, as under HumanEval's exec: what an answer would do as a script, such
# as read input or end by unittest.main(), would end it before its tests.
LIMITED = """
import os, resource as r, runpy, sys
program, processes, *rest = sys.argv[1:]
hard = r.getrlimit(r.RLIMIT_NPROC)[1]
fewer = int(processes) if hard == r.RLIM_INFINITY else min(int(processes), hard)
r.setrlimit(r.RLIMIT_NPROC, (fewer, hard))
try:
    os.fork() or os._exit(0)
    os.wait()
    r.setrlimit(r.RLIMIT_NPROC, (fewer, fewer))
except OSError:
    r.setrlimit(r.RLIMIT_NPROC, (hard, hard))
for name, value in zip(("CPU", "AS", "FSIZE", "CORE"), map(int, rest)):
    r.setrlimit(getattr(r, "RLIMIT_" + name), (value, value))
sys.argv = [program]
runpy.run_path(program, run_name="program")
"""


class Limits(NamedTuple):
    """What a program may take; bytes of memory and of a file also hold for each process."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10  # of each process
    memory_bytes: int = 2 * 2**30  # resident, of all processes together
    processes: int = 64  # at once
    file_bytes: int = 2**20  # of each file
    folder_bytes: int = 2**26  # of all files in the program's folder


class Process(NamedTuple):
    """A line of /proc/PID/stat."""

    pid: int
    parent: int
    state: str
    memory_bytes: int


def main(program: str, limits: Limits) -> int:
    evaluation = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    each = (limits.cpu_seconds, limits.memory_bytes, limits.file_bytes, 0)
    most = _tasks_of_user() + FORKS_BESIDE + limits.processes
    command = [sys.executable, "-I", "-c", LIMITED, program, *map(str, (most, *each))]
    try:
        child = subprocess.Popen(command, start_new_session=True)
        return _watch(child, Path(program).parent, limits, evaluation)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all()


def _watch(child: subprocess.Popen, folder: Path, limits: Limits, evaluation: int) -> int:
    """The exit code, once the program has ended, takes too much or is no longer wanted."""
    end = time.monotonic() + limits.wall_seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(LOOK_SECONDS)
            return FAILED if code or _takes_too_much(folder, limits) else PASSED
        if time.monotonic() > end:
            return TIMEOUT
        if _takes_too_much(folder, limits) or os.getppid() != evaluation:
            return FAILED


def _takes_too_much(folder: Path, limits: Limits) -> bool:
    living = _living()
    memory = sum(process.memory_bytes for process in living)
    return (
        len(living) > limits.processes
        or memory > limits.memory_bytes
        or _folder_bytes(folder) > limits.folder_bytes
    )


def _folder_bytes(folder: Path) -> float:
    """Bytes of all files under a folder; beyond any limit if they are too many or too deep."""
    total, count, unseen = 0.0, 0, list[OSError]()
    for place, _, names in os.walk(folder, onerror=unseen.append):
        count += 1 + len(names)
        if count > MOST_FILES:
            return float("inf")
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    deep = any(error.errno == errno.ENAMETOOLONG for error in unseen)
    return float("inf") if deep else total


def _end_all() -> None:
    """Kills the processes under this one, first stopped, so that none of them starts another."""
    stopped = set[int]()
    end = time.monotonic() + END_SECONDS
    while (living := {process.pid for process in _living()} - stopped) and time.monotonic() < end:
        _signal(living, signal.SIGSTOP)
        stopped |= living
    while (living := {process.pid for process in _living()}) and time.monotonic() < end:
        _signal(living, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _living() -> list[Process]:
    """The processes under this one, without zombies."""
    children: dict[int, list[Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    descendants, above = list[Process](), [os.getpid()]
    while above:
        below = children.get(above.pop(), [])
        descendants += below
        above += [process.pid for process in below]
    return [process for process in descendants if process.state not in "ZX"]


def _processes() -> Iterator[Process]:
    """The system's processes, without those that end meanwhile."""
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in _numbered(Path("/proc")):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            state, parent, pages = fields[0].decode(), int(fields[1]), int(fields[21])
            yield Process(int(entry.name), parent, state, page * pages)


def _tasks_of_user() -> int:
    """Processes and threads of this user, as RLIMIT_NPROC counts them."""
    count, user = 0, os.getuid()
    for entry in _numbered(Path("/proc")):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == user:
                count += len(_numbered(entry / "task"))
    return count


def _numbered(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.name.isdecimal()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Limits(*json.loads(sys.argv[2]))))
