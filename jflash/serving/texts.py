"""Texts of an engine's requests: stop texts, and several samples of a prompt.

The engine knows ids alone. Its events are decoded here as they come, in the reader's thread. A
request whose text has come to a stop text is cancelled, and its tokens end with the one that
completed the stop text, as plain decoding's would.
"""

import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from jflash.io.incremental import Incremental
from jflash.io.text import decode, mark_ids
from jflash.records.decoding import whole
from jflash.serving.handle import Handle, result_of
from jflash.serving.request import Event, Full, Request, Result, several


class Submits(Protocol):
    """What an `Engine` does here; a server's process has none, and does not import it."""

    def submit(self, request: Request) -> Handle: ...

    def wait_for_room(self) -> None: ...


class TextEvent(NamedTuple):
    """A step's text, which may be empty while it may still become a stop text, and its event."""

    text: str
    event: Event


@dataclass(frozen=True, kw_only=True)
class Answer(Result):
    """A request that has ended, with its text: without its stop id, and up to a stop text."""

    text: str


class Reading:
    """The text of one request, whose events are given one after another up to the last. It goes on
    with that of the tokens `before` it, if any. One of the tokens `marks` ends it too: special ones
    that are stop texts, for no text has them."""

    def __init__(
        self,
        request: Request,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
        marks: Sequence[int] = (),
    ) -> None:
        self._text = Incremental(decode, stops, request.min_tokens, before)
        self._marks, self._least = frozenset(marks), request.min_tokens
        self.stopped = False

    def take(self, event: Event) -> TextEvent:
        """The event's text. If it comes to a stop text, the event is the last one, and has the
        tokens with which plain decoding would have ended."""
        event = self._to_mark(event) if self._marks else event
        shown = event.token_ids
        if event.finish_reason == "stop" and shown:  # by its stop id, of which no text is shown
            shown = shown[:-1]
        piece = self._text.push(shown, last=event.finish_reason is not None)
        if self._text.stopped:
            event, self.stopped = _ended(event, self._text.taken), True
        return TextEvent(piece, event)

    def _to_mark(self, event: Event) -> Event:
        """The event up to the first of the marks that is not among the least tokens."""
        for count, token in enumerate(event.token_ids, 1):
            if self._least > 0:
                self._least -= 1
            elif token in self._marks:
                self.stopped = True
                return _ended(event, count)
        return event


class TextReader:
    """A handle's text as it is decoded: iterate it, with `for` or `async for`, once.

    `stop` is a text, or several; the request is cancelled as soon as one of them is complete.
    ValueError for one that is empty.
    """

    def __init__(self, handle: Handle, tokenizer: Any, stop: str | Sequence[str] = ()) -> None:
        reading = _readings(tokenizer, checked_stops(stop))
        self._handle, self._reading = handle, reading(handle.request)

    def __iter__(self) -> Iterator[TextEvent]:
        for event in self._handle:
            yield (step := self._take(event))
            if step.event.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        async for event in self._handle:
            yield (step := self._take(event))
            if step.event.finish_reason is not None:
                return

    def _take(self, event: Event) -> TextEvent:
        step = self._reading.take(event)
        if self._reading.stopped:
            self._handle.cancel()
        return step


def answers(
    engine: Submits,
    requests: Iterable[Request],
    tokenizer: Any,
    *,
    stop: str | Sequence[str] = (),
    n: int = 1,
) -> list[Answer]:
    """Submits `n` samples of each request as the queue has room, and waits for all of them.

    The answers come in order, the samples of a request beside one another: sample i draws with the
    request's `index` + i. `stop` as for TextReader. ValueError as `Engine.check`, and for an `n`
    below 1. An error cancels the others.
    """
    if whole("n", n) < 1:
        raise ValueError(f"n {n} must be at least 1")
    reading_of = _readings(tokenizer, checked_stops(stop))
    samples = (replace(each, index=each.index + i) for each in several(requests) for i in range(n))
    came = SimpleQueue[tuple[int, list[Event] | BaseException]]()
    handles, open_ones = list[Handle](), dict[int, Reading]()
    taken: list[list[TextEvent]] = []

    def read() -> None:
        """Waits for events of a request, and takes them."""
        number, events = came.get()
        if isinstance(events, BaseException):
            raise events
        for event in events:
            if number not in open_ones:
                return  # it came to a stop text
            reading = open_ones[number]
            taken[number].append(step := reading.take(event))
            if reading.stopped:
                handles[number].cancel()
            if step.event.finish_reason is not None:
                del open_ones[number]

    try:
        for number, sample in enumerate(samples):
            while True:
                try:
                    handles.append(engine.submit(sample))
                    break
                except Full:
                    if open_ones:
                        read()
                    else:
                        engine.wait_for_room()
            open_ones[number] = reading_of(sample)
            taken.append([])
            handles[-1].forward(functools.partial(_put, came, number))
        while open_ones:
            read()
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return [_answer(handle.request, steps) for handle, steps in zip(handles, taken, strict=True)]


def _readings(tokenizer: Any, stops: Sequence[str]) -> Callable[[Request], Reading]:
    """What reads the text of a request up to one of the stop texts."""
    plain = functools.partial(decode, tokenizer)
    return functools.partial(Reading, decode=plain, stops=stops, marks=mark_ids(tokenizer, stops))


def checked_stops(stop: str | Sequence[str]) -> list[str]:
    """The stop texts. ValueError for one that is empty or no text."""
    try:
        stops = [stop] if isinstance(stop, str) else list(stop)
    except TypeError:
        raise ValueError(f"stop {stop!r} must be a text, or several; () for none") from None
    for each in stops:
        if not (isinstance(each, str) and each):
            raise ValueError(f"stop {each!r} must be a text of at least one character")
    return stops


def _put(came: SimpleQueue, number: int, what: list[Event] | BaseException) -> None:
    came.put((number, what))


def _answer(request: Request, steps: Sequence[TextEvent]) -> Answer:
    result = result_of(request, [step.event for step in steps])
    return Answer(**vars(result), text="".join(step.text for step in steps))


def _ended(event: Event, count: int) -> Event:
    """The event of the first `count` tokens, with which the text has come to a stop."""
    return event._replace(
        finish_reason="stop",
        token_ids=event.token_ids[:count],
        accepted=min(event.accepted, max(count - 1, 0)),
        logprobs=event.logprobs and event.logprobs[:count],
        top_logprobs=event.top_logprobs and event.top_logprobs[:count],
    )
