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
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jflash.serving.grammar import Kind, Opening
from jflash.serving.handle import Handle
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


# Of a request that was taken: the fields of each event, which pickle in a sixth of an event's time.
Came = tuple[int, list[tuple[Any, ...]] | Exception]


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
    """Ends both directions, also under a thread that reads: to close the file would not wake it."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Remote:
    """The engine at the other end of a pipe, as a jflash.serving.decoder.Decoder.

    `stats` are as old as the last news. Once the other end has gone, every request fails.
    """

    def __init__(self, pipe: Connection, sizes: Sizes, first: News) -> None:
        self.max_context, self.vocabulary = sizes
        self._pipe, self._stats, self._compiled = pipe, first.stats, first.compiled
        self.on_compiled: Callable[[int], None] | None = None  # told how many more programs
        self.on_lost: Callable[[str], None] | None = None  # told that no token comes any more
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the pipe's end for writing, and of what follows
        self._handles = dict[int, Handle]()
        self._waiting = dict[int, Future[None]]()
        self._lost: Failed | None = None
        threading.Thread(target=self._read, name="jflash-events", daemon=True).start()

    async def submit(self, request: Request) -> Handle:
        number, grammar = next(self._numbers), request.grammar
        source = None if grammar is None else (grammar.kind, grammar.text, grammar.opens)
        handle = Handle(request, lambda _: self._leave(number))
        taken = Future[None]()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._handles[number], self._waiting[number] = handle, taken
            self._send(Asked(number, replace(request, grammar=None), source))
        try:
            await asyncio.wrap_future(taken)
        except asyncio.CancelledError:
            handle.cancel()
            raise
        return handle

    def stats(self) -> Stats:
        return self._stats

    def close(self) -> None:
        """Ends the connection, and so the other end."""
        hang_up(self._pipe)

    def _leave(self, number: int) -> None:
        with self._lock:
            if self._lost is None:
                self._send(Left(number))

    def _send(self, message: Asked | Left) -> None:
        with contextlib.suppress(OSError):  # the reader finds the end too, and tells every request
            self._pipe.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._take(self._pipe.recv())
        except (EOFError, OSError):
            lost = Failed("the engine's process has ended")
        with self._lock:
            self._lost = lost
            handles, waiting = list(self._handles.values()), list(self._waiting.values())
        if self.on_lost is not None:
            self.on_lost(str(lost))
        for future in waiting:
            _answer(future, lost)
        for handle in handles:
            if not handle.ended:
                handle.fail(lost)

    def _take(self, news: News) -> None:
        self._stats = news.stats
        if news.compiled > self._compiled and self.on_compiled is not None:
            self.on_compiled(news.compiled - self._compiled)
            self._compiled = news.compiled
        for number, refusal in news.taken:
            with self._lock:
                future = self._waiting.pop(number)
                if refusal is not None:
                    del self._handles[number]
            _answer(future, refusal)
        for number, what in news.came:
            handle = self._handles[number]
            if isinstance(what, Exception):
                handle.fail(what)
            else:
                handle.give([Event(*fields) for fields in what])
            if handle.ended:
                with self._lock:
                    del self._handles[number]


def _answer(future: Future[None], refusal: Exception | None) -> None:
    if not future.set_running_or_notify_cancel():
        return  # whoever asked has gone
    if refusal is None:
        future.set_result(None)
    else:
        future.set_exception(refusal)
