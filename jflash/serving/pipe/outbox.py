"""What goes into a pipe whose other end may have stopped reading, from an event loop that may not
wait for it.
"""

import contextlib
import queue
import select
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

AT_ONCE = 16 * 1024  # bytes: a pipe that takes anything takes as many


class Outbox:
    """Sends messages in order. Those that might fill the pipe wait in a thread, which is there only
    once one did: it costs the loop more than to send a small one itself."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._thread = pipe, None
        self._left = queue.SimpleQueue[bytes]()
        self._waiting = 0  # messages; only the loop adds, and only the thread takes off
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Returns at once. A pipe whose end is gone takes nothing, and says nothing."""
        data = bytes(ForkingPickler.dumps(message))
        with self._lock:
            at_once = not self._waiting and len(data) <= AT_ONCE and self._takes()
            self._waiting += not at_once
        if at_once:
            self._write(data)
            return
        self._left.put(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jflash-outbox", daemon=True)
            self._thread.start()

    def _takes(self) -> bool:
        poll = select.poll()
        with contextlib.suppress(OSError):  # it is closed
            poll.register(self._pipe, select.POLLOUT)
        return bool(poll.poll(0))

    def _run(self) -> None:
        while True:
            self._write(self._left.get())
            with self._lock:
                self._waiting -= 1

    def _write(self, data: bytes) -> None:
        # TypeError: it was closed while a part of the message was left, and has no number any more.
        with contextlib.suppress(OSError, TypeError):
            self._pipe.send_bytes(data)
