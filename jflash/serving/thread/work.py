"""An engine's queue and its thread, which works until it is told to end.

It knows no engine: one that nobody holds any more, nor a handle of it, tells it to end. This file
knows jobs, the loop's rounds and no device.
"""

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jflash.serving.request import Event, Failed, FinishReason, Full
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop

LOG = logging.getLogger(__name__)
LAST = 10.0  # seconds that a process which ends waits for an engine at most


class Work:
    """Jobs that wait, and the thread that has the loop's rounds made; at most `most` wait beside
    those for which there are places."""

    def __init__(self, loop: Loop, most: int) -> None:
        self._loop, self._most = loop, most
        lock = threading.RLock()
        self.changed, self._room = threading.Condition(lock), threading.Condition(lock)
        self._inbox = list[Job]()
        self._actions = deque[tuple[Callable[[], Any], Future]]()
        self._arrived, self._closing = 0, False
        self.ended: dict[FinishReason, int] = {}
        self._error: BaseException | None = None
        self._broken: BaseException | None = None  # of who was given events, in this round
        self._thread = threading.Thread(target=self._guarded, name="jflash-engine", daemon=True)
        self._thread.start()
        _open.add(self)

    def add(self, make: Callable[[int], Job]) -> None:
        """Queues the job that `make` makes of its number. Full, Failed; RuntimeError once ended."""
        with self.changed:
            self._check_at_work()
            if not self._left():
                raise Full(f"{self._most} requests wait")
            self._inbox.append(make(self._arrived))
            self._arrived += 1
            self.changed.notify()

    def waiting(self) -> int:
        """The number of jobs that wait for a place; the caller holds `changed`."""
        return len(self._inbox) + self._loop.without_place

    def _left(self) -> int:
        """How many more jobs may come; the caller holds `changed`. Those that the next round gives
        a place take none of the others' room."""
        return max(0, self._most + self._loop.free_places - self.waiting())

    @property
    def room(self) -> int:
        """How many more jobs `add` would take now; else as that."""
        with self.changed:
            self._check_at_work()
            return self._left()

    def wait_for_room(self) -> None:
        """Until `add` would not raise Full, though another thread may come first."""
        self._check_may_wait()
        with self._room:
            ended = lambda: self._closing or self._error is not None  # noqa: E731
            self._room.wait_for(lambda: ended() or self._left())

    def between[T](self, action: Callable[[], T]) -> T:
        """The result of `action`, which the thread runs as soon as no job runs."""
        self._check_may_wait()
        done = Future[T]()
        with self.changed:
            self._check_at_work()
            self._actions.append((action, done))
            self.changed.notify()
        return done.result()

    def cancel(self, job: Job) -> None:
        """Ends a job early."""
        with self.changed:
            job.cancelled = True
            self.changed.notify()

    def tell_to_end(self) -> None:
        """Cancels all jobs and lets the thread end; it waits for nothing, so any thread may."""
        with self.changed:
            self._closing = True
            self.changed.notify()
            self._room.notify_all()

    def end(self, seconds: float | None = None) -> None:
        """The same, and waits for the thread, so many seconds at most, unless it is the caller."""
        self.tell_to_end()
        if not self._by_itself:
            self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; in a fork none does."""
        return self._thread.is_alive()

    @property
    def _by_itself(self) -> bool:
        """Whether the thread is the caller, in what it calls back."""
        return threading.current_thread() is self._thread

    def _check_may_wait(self) -> None:
        """RuntimeError in the thread itself, which would wait for itself for ever."""
        if self._by_itself:
            raise RuntimeError("the engine's thread calls this, and cannot wait for itself")

    def _check_at_work(self) -> None:
        """Failed, or RuntimeError, if nothing will be done any more."""
        if self._error is not None:
            raise Failed("the engine has failed") from self._error
        if self._closing:
            raise RuntimeError("the engine is closed")
        if not self.alive:  # no fork has its parent's threads
            raise RuntimeError("the engine is of the process that was forked: make one after it")

    def _guarded(self) -> None:
        try:
            while self._turn():
                pass
            self._loop.close()
        except BaseException as error:
            with self.changed:
                self._error = error
                left, self._inbox = [*self._loop.drop(), *self._inbox], []
                actions, self._actions = self._actions, deque()
                self._room.notify_all()
            for _, done in actions:
                done.set_exception(error)
            self._loop.tell(self._on_events)  # of what was read before
            for job in left:
                failure = Failed("the engine has failed")
                failure.__cause__ = error
                try:
                    if not job.handle.ended:
                        job.handle.fail(failure)
                except Exception:  # the others hear of it all the same
                    LOG.exception("what a request's failure was given to failed")
            self._loop.before_waiting()

    def _turn(self) -> bool:
        """One round, or a wait for work; False once ended and empty."""
        loop = self._loop
        with self.changed:
            self._room.notify_all()  # the last round may have begun some that waited
            self.changed.wait_for(
                lambda: self._inbox or self._closing or self._actions or not loop.idle,
                loop.patience,
            )
            loop.waiting += self._inbox
            self._inbox, closing = [], self._closing
            if closing:
                for job in (*loop.waiting, *loop.running):
                    job.cancelled = True
            loop.held = bool(self._actions)
        if loop.quiet and self._actions:
            loop.before_waiting()
            with self.changed:
                action, done = self._actions.popleft()
            try:
                done.set_result(action())
            except Exception as error:  # such as memory that is missing: who wanted it hears of it
                done.set_exception(error)
            return True
        if loop.idle:
            return not closing  # whoever came since is cancelled by the next turn
        loop.round(self._on_events)
        if self._broken is not None:
            raise self._broken
        if loop.idle:
            loop.before_waiting()
        return True

    def _on_events(self, job: Job, events: list[Event]) -> None:
        if reason := events[-1].finish_reason:
            with self.changed:
                self.ended[reason] = self.ended.get(reason, 0) + 1
        try:
            job.handle.give(events)
        except BaseException as error:  # later: these come with others', which would be lost
            self._broken = self._broken or error


_open = weakref.WeakSet[Work]()


@atexit.register
def close_all() -> None:
    """Ends what nobody closed: a process aborts if it ends while a thread is in XLA."""
    for work in list(_open):
        if work.alive:
            work.end(LAST)
