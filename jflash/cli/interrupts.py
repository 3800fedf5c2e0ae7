"""Ctrl-C: one that Python would drop, and one that ends a command when all is saved; and SIGTERM.

Python drops what is raised where nobody can catch it, such as in a callback of its garbage
collector. JAX has one, which runs often while programs are traced, so a command went on.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SOON = 0.01  # seconds, after which Python has left the callback
TERMINATED = 143  # 128 + SIGTERM, as shells count


@contextlib.contextmanager
def dropped_ones_come_again() -> Iterator[None]:
    """Within the block a dropped KeyboardInterrupt is raised again, a little later."""
    usual, again = sys.unraisablehook, list[threading.Timer]()
    main = threading.main_thread().ident
    assert main is not None

    def hook(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            return usual(dropped)
        while True:
            again.append(threading.Timer(SOON, signal.pthread_kill, (main, signal.SIGINT)))
            try:
                again[-1].start()
                return None
            except KeyboardInterrupt:  # before the thread was told to run: this one is dropped too
                continue

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in again:
            timer.cancel()  # what it would have ended has ended


@contextlib.contextmanager
def first_interrupt(
    note: str = "\nstopping as soon as all is saved; Ctrl-C again stops at once\n",
) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed; the first press prints `note`.

    A second Ctrl-C interrupts as usual.
    """
    pressed = False

    def press(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not print: the interrupted code may be in the middle of one.
        os.write(2, note.encode())

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def sigterm_cleans_up() -> Iterator[None]:
    """Within the block SIGTERM is a SystemExit, so that a child and a temporary folder go too.

    A second one ends the process at once.
    """

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
