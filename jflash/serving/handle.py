"""A request on its way: its events, as they come, to one reader in a thread or an event loop.

The engine's thread adds events and never waits for the reader. This file knows no device.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence

from jflash.serving.request import Event, FinishReason, Full, Request, Result, several

LOG = logging.getLogger(__name__)


class Alarm:
    """Wakes the readers of one event loop from the engine's thread: many of them by one call.

    Each call is one of the system, in which the event loop's thread takes the interpreter.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = weakref.ref(loop), threading.Lock()
        self._readers, self._thread = list[asyncio.Event](), threading.get_ident()

    def ring(self, reader: asyncio.Event) -> None:
        """Wakes a reader soon; whoever rings before the loop has come wakes with the same call."""
        if threading.get_ident() == self._thread:
            reader.set()
            return
        with self._lock:
            self._readers.append(reader)
            first = len(self._readers) == 1
        loop = self._loop()
        if first and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, []
        for reader in readers:
            reader.set()


_alarms = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Alarm]()


def _alarm() -> Alarm:
    """That of the running event loop."""
    loop = asyncio.get_running_loop()
    return _alarms.setdefault(loop, Alarm(loop))


class Handle:
    """What `Engine.submit` returns. Iterate it, with `for` or `async for`, once.

    Every event is handed out once, the last one with its finish reason. An engine that fails raises
    its error in every reader, after the events that came before.
    """

    def __init__(self, request: Request, on_cancel: Callable[["Handle"], None]) -> None:
        self.request = request
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._events = deque[Event]()
        self._past = list[Event]()
        self._ended = False
        self._error: BaseException | None = None
        self._wakes = list[Callable[[], None]]()
        self._at_end: Callable[[], None] | None = None
        self._to: Callable[[list[Event] | BaseException], None] | None = None

    def cancel(self) -> None:
        """Ends the request soon, in any phase; its last event is 'cancelled'.

        A request that has ended does not change.
        """
        self._on_cancel(self)

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._ended)
                event = self._next()
            if event is None:
                return
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for events in self.several(1):
            yield events[0]

    async def several(self, most: int) -> AsyncGenerator[list[Event]]:
        """The events in lists of those that are there without waiting, `most` at most."""
        alarm, arrived = _alarm(), asyncio.Event()
        wake = functools.partial(alarm.ring, arrived)
        while True:
            with self._changed:
                waits = not (self._events or self._ended)
                events = [self._events.popleft() for _ in range(min(most, len(self._events)))]
                if waits:
                    arrived.clear()
                    self._wakes.append(wake)
            if waits:
                await arrived.wait()
            elif events:
                yield events
            elif self._error is not None:
                raise self._error
            else:
                return

    def result(self) -> Result:
        """Waits for the end of the request; the result of all its events."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
            if self._error is not None:
                raise self._error
            events = list(self._past)
        return result_of(self.request, events)

    def at_end(self, do: Callable[[], None]) -> None:
        """Calls `do` once, when the request has ended or failed: in the engine's thread, or now.

        An error of it is logged, and no other request hears of it. It may not wait for the engine.
        """
        with self._changed:
            self._at_end = do
            if self._ended:
                self._tell_end()

    def forward(self, to: Callable[[list[Event] | BaseException], None]) -> None:
        """Gives events, or the error, to `to` and no reader: in the engine's thread, which fails if
        `to` does, and those that have come already now."""
        with self._changed:
            self._to, came = to, list(self._events)
            self._events.clear()
            if came:
                to(came)
            if self._error is not None:
                to(self._error)

    def give(self, events: list[Event]) -> None:
        """Adds events; the engine's thread calls it."""
        with self._changed:
            assert not self._ended, "nothing comes after the last event"
            self._past.extend(events)
            self._ended = bool(events) and events[-1].finish_reason is not None
            try:
                if self._to is None:
                    self._events.extend(events)
                else:
                    self._to(events)
            finally:  # whoever waits for the end waits no longer, whatever `to` does
                self._notify()

    def fail(self, error: BaseException) -> None:
        """Ends the events with `error`, which the reader raises; the engine's thread calls it."""
        with self._changed:
            self._error, self._ended = error, True
            try:
                if self._to is not None:
                    self._to(error)
            finally:
                self._notify()

    @property
    def begun(self) -> bool:
        """Whether an event was added, read or unread."""
        return bool(self._past)

    @property
    def ended(self) -> bool:
        """Whether the last event was added, read or unread."""
        return self._ended

    def _next(self) -> Event | None:
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _notify(self) -> None:
        self._changed.notify_all()
        wakes, self._wakes = self._wakes, []  # who waits is woken once
        for wake in wakes:
            wake()
        if self._ended:
            self._on_cancel = lambda _: None  # it holds its engine no longer
            self._tell_end()

    def _tell_end(self) -> None:
        try:
            if self._at_end is not None:
                self._at_end()
        except Exception:
            LOG.exception("what was to be called at a request's end failed")


def result_of(request: Request, events: list[Event]) -> Result:
    """The events of a whole request put together."""
    reason: FinishReason | None = events[-1].finish_reason
    assert reason is not None, "a result is made of a request that has ended"
    counts = [len(event.token_ids) for event in events if event.token_ids]

    def joined[T](parts: Iterable[Sequence[T] | None], asked: bool) -> list[T] | None:
        return [x for part in parts for x in part or ()] if asked else None

    return Result(
        prompt_tokens=len(request.prompt_ids),
        token_ids=[token for event in events for token in event.token_ids],
        acceptance_lengths=counts[1:],
        finish_reason=reason,
        cached_tokens=events[-1].cached_tokens,
        logprobs=joined((e.logprobs for e in events), request.logprobs),
        top_logprobs=joined((e.top_logprobs for e in events), request.top_logprobs > 0),
        prompt_logprobs=joined(
            (e.prompt_logprobs for e in events), request.prompt_logprobs is not None
        ),
        prompt_top_logprobs=joined(
            (e.prompt_top_logprobs for e in events), bool(request.prompt_logprobs)
        ),
        version=events[-1].version,
    )


def results_of(
    requests: Iterable[Request],
    submit: Callable[[Request], Handle],
    wait_for_room: Callable[[], None],
) -> list[Result]:
    """The results of requests, which are submitted as the queue takes them; an error cancels those
    that have been."""
    handles = list[Handle]()
    try:
        for request in several(requests):
            while True:
                try:
                    handles.append(submit(request))
                    break
                except Full:
                    wait_for_room()
        return [handle.result() for handle in handles]
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
