"""An engine of another process: requests go to it through a pipe, and its events come back.

One thread of a process runs Python at a time, so text and HTTP beside the engine's thread would
keep the device waiting. Both ends are processes of one server, which trust each other: messages
are pickled. This file knows no device; `answering` has the other end.
"""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NamedTuple

from jflash.serving.grammar import Kind, Opening
from jflash.serving.handle import Handle
from jflash.serving.pipe.outbox import Outbox
from jflash.serving.pipe.turns import Turns, What
from jflash.serving.request import Event, Failed, Request
from jflash.serving.stats import Stats


class Asked(NamedTuple):
    """A request under a number; a grammar travels as what it is compiled from."""

    number: int
    request: Request
    grammar: tuple[Kind, str, Opening | None] | None


class Left(NamedTuple):
    """Nobody waits for this request any more."""

    number: int


FINISH = Event._fields.index("finish_reason")

Came = tuple[int, What]  # for a request that was taken


class News(NamedTuple):
    """What has happened since the last news, in order."""

    taken: list[tuple[int, Exception | None]]  # requests that wait now, or why they do not
    came: list[Came]
    stats: Stats
    compiled: int  # programs, since the engine was ready


class Sizes(NamedTuple):
    """What an engine can hold."""

    max_context: int
    vocabulary: int


def hang_up(pipe: Connection) -> None:
    """Ends both directions, also under whoever waits for it: to close the file would not wake
    them."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Remote:
    """The engine at the other end of a pipe, as a jflash.serving.decoder.Decoder.

    The event loop that has it as an asynchronous context manager reads the pipe itself, for a
    thread beside it would take turns with it for each of the news. `stats` are as old as the last
    news. Once the other end has gone, every request fails.
    """

    def __init__(self, pipe: Connection, sizes: Sizes, first: News) -> None:
        self.max_context, self.vocabulary = sizes
        self._pipe, self._outbox = pipe, Outbox(pipe)
        self._stats, self._compiled = first.stats, first.compiled
        self.on_compiled: Callable[[int], None] | None = None  # told how many more programs
        self.on_lost: Callable[[str], None] | None = None  # told that no token comes any more
        self._numbers = itertools.count()
        self._handles = dict[int, Handle]()
        self._waiting = dict[int, asyncio.Future[None]]()
        self._turns, self._giving = Turns(), False  # what to hand on, which is under way
        self._lost: Failed | None = None
        self._heard = 0  # news

    async def __aenter__(self) -> "Remote":
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())

    async def submit(self, request: Request) -> Handle:
        if self._lost is not None:
            raise self._lost
        number, grammar, source = next(self._numbers), request.grammar, None
        handle = Handle(request, lambda _: self._leave(number))
        if grammar is not None:
            source = grammar.kind, grammar.text, grammar.opens
            request = replace(request, grammar=None)
        taken = asyncio.get_running_loop().create_future()
        self._handles[number], self._waiting[number] = handle, taken
        self._outbox.send(Asked(number, request, source))
        try:
            await taken
        except asyncio.CancelledError:
            handle.cancel()
            raise
        return handle

    def stats(self) -> Stats:
        return self._stats

    def unanswered(self) -> int | None:
        """How many news have come, if a request waits to be queued: its grammar may be compiled
        meanwhile, but an engine that is there sends news."""
        return self._heard if self._waiting else None

    def give_up(self, why: Failed) -> None:
        """Fails all requests, and reads no more news."""
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._lost = why
        for future in self._waiting.values():
            _answer(future, why)
        for handle in self._handles.values():
            if not handle.ended:
                handle.fail(why)

    def close(self) -> None:
        """Ends the connection, and so the other end."""
        hang_up(self._pipe)

    def _leave(self, number: int) -> None:
        if self._lost is None:
            self._outbox.send(Left(number))

    def _read(self) -> None:
        try:
            news = self._pipe.recv()
        except (EOFError, OSError):
            self._lose()
        else:
            self._take(news)

    def _lose(self) -> None:
        lost = Failed("the engine's process has ended")
        while self._turns:
            self._give(*self._turns.pop())
        if self.on_lost is not None:
            self.on_lost(str(lost))
        self.give_up(lost)

    def _take(self, news: News) -> None:
        self._stats, self._heard = news.stats, self._heard + 1
        if news.compiled > self._compiled and self.on_compiled is not None:
            self.on_compiled(news.compiled - self._compiled)
            self._compiled = news.compiled
        for number, refusal in news.taken:
            if refusal is not None:
                del self._handles[number]
            _answer(self._waiting.pop(number), refusal)
        for number, what in news.came:
            # Who waits for a first token sees it, and whoever has an answer may ask again.
            self._turns.add(number, what, not self._handles[number].begun or not _goes_on(what))
        if not self._giving:
            self._give_next()

    def _give_next(self) -> None:
        """Hands on what came for one request: its reader, and whoever asks meanwhile, have their
        turn before the next."""
        if self._turns:  # not lost meanwhile
            self._give(*self._turns.pop())
        self._giving = bool(self._turns)
        if self._giving:
            asyncio.get_running_loop().call_soon(self._give_next)

    def _give(self, number: int, came: Sequence[What]) -> None:
        handle = self._handles[number]
        if handle.ended:  # it was given up
            return
        for what in came:
            if isinstance(what, Exception):
                handle.fail(what)
            else:
                handle.give([Event(*fields) for fields in what])
        if handle.ended:
            del self._handles[number]


def _goes_on(what: What) -> bool:
    """Whether no event is the last one."""
    return isinstance(what, Exception) or what[-1][FINISH] is None


def _answer(future: asyncio.Future[None], refusal: Exception | None) -> None:
    if future.done():
        return  # whoever asked has gone
    if refusal is None:
        future.set_result(None)
    else:
        future.set_exception(refusal)
