"""A thread that does what another one leaves to it, one thing after the other.

It knows no device: jflash.serving.thread.device leaves the dispatch of programs to it.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class InOrder:
    """Work in the order in which it comes. After an error nothing more is done: all that follows
    fails with it, for it may need what was not done. A process ends without waiting for it."""

    def __init__(self, name: str) -> None:
        self._queue, self._error = SimpleQueue[Callable[[], None] | None](), None
        self._thread = threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    def do[T](self, work: Callable[[], T]) -> Future[T]:
        """Leaves the work to the thread."""
        future = Future[T]()

        def done() -> None:
            try:
                if self._error is not None:
                    raise self._error
                future.set_result(work())
            except BaseException as error:
                self._error = error
                future.set_exception(error)

        self._queue.put(done)
        return future

    def finish(self) -> None:
        """Waits until all is done; raises the error of what failed."""
        self.do(lambda: None).result()

    def close(self) -> None:
        """Ends the thread, once it has done all."""
        self._queue.put(None)
        self._thread.join()


def _run(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # or its arrays would live until the next one
