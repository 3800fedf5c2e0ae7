"""The end of a pipe where the engine is: takes requests from it, and sends news of them.

The engine's thread leaves events here and goes on; another thread sends those of a call together,
when that one says so: at other times the engine's thread would wait for Python.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from jflash.io.foreign import one_line
from jflash.serving.collection import only_of_new_objects
from jflash.serving.engine import Engine
from jflash.serving.grammar import GrammarError, Grammars
from jflash.serving.handle import Handle
from jflash.serving.pipe.remote import Asked, Came, Left, News
from jflash.serving.request import Event, Failed, Full, TooLong

IDLE = 0.2  # seconds between news when nothing happens: they show that the engine is there
COMPILERS = 2  # grammars compiled at once, beside other requests
# Seconds for which a thread may keep Python from others. The engine's thread runs Python for most
# of a round, and a request passes through two other threads on its way: at the usual 5 ms it waited
# 12 ms for them (three threads of Python 3.12 that did nothing else), and 3.4 ms with this. Shorter
# turns break up the work of the thread that dispatches.
TURN = 5e-4


class _Outbox:
    """Sends news while the engine's thread goes on."""

    def __init__(self, engine: Engine, pipe: Connection, compiled: Callable[[], int]) -> None:
        self._engine, self._pipe, self._compiled = engine, pipe, compiled
        self._changed, self._open, self._due = threading.Condition(), True, False
        self._taken = list[tuple[int, Exception | None]]()
        self._came = list[tuple[int, list[Event] | Exception]]()
        self._thread = threading.Thread(target=self._run, name="jflash-news", daemon=True)
        self._thread.start()

    def taken(self, number: int, refusal: Exception | None) -> None:
        with self._changed:
            self._taken.append((number, refusal))
            self._send_soon()

    def came(self, number: int, what: list[Event] | BaseException) -> None:
        """Leaves this for the next news, which `flush` sends."""
        given = what if isinstance(what, list) else _plain(what)
        with self._changed:
            self._came.append((number, given))

    def flush(self) -> None:
        with self._changed:
            if self._came:
                self._send_soon()

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join()

    def news(self) -> News:
        """What has come, and is given once."""
        with self._changed:
            taken, came, self._taken, self._came = self._taken, self._came, [], []
        return News(taken, _joined(came), self._engine.stats(), self._compiled())

    def _send_soon(self) -> None:
        self._due = True
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    if not self._open:
                        return
                    self._changed.wait(IDLE)
                self._due = False
            try:
                self._pipe.send(self.news())
            except OSError:  # nobody reads any more: the receiving thread ends all
                return


def _joined(came: list[tuple[int, list[Event] | Exception]]) -> list[Came]:
    """The message that travels: the events of each request as one list, then the errors."""
    events = dict[int, list[tuple[Any, ...]]]()
    for number, what in came:
        if isinstance(what, list):
            events.setdefault(number, []).extend(map(tuple, what))
    return [*events.items(), *((n, what) for n, what in came if isinstance(what, Exception))]


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def answer(
    engine: Engine, grammars: Grammars, pipe: Connection, compiled: Callable[[], int]
) -> None:
    """Serves the other end of the pipe until it closes; what still runs then is cancelled."""
    outbox, handles = _Outbox(engine, pipe, compiled), dict[int, Handle]()
    # Requests whose grammar is compiled or waits for that, and those of them that have left.
    compiling, left = set[int](), set[int]()

    def forget(number: int) -> None:
        handles.pop(number, None)

    def take(asked: Asked) -> None:
        number, request = asked.number, asked.request
        try:
            if number in left:
                raise RuntimeError("the client has left")
            if asked.grammar is not None:
                request = replace(request, grammar=grammars.compile(*asked.grammar))
            handle = engine.submit(request)
        except Exception as error:
            outbox.taken(number, _plain(error))
            compiling.discard(number)
            left.discard(number)
            return
        outbox.taken(number, None)
        handles[number] = handle
        handle.forward(partial(outbox.came, number))
        handle.at_end(partial(forget, number))
        outbox.flush()  # what came before
        compiling.discard(number)
        if number in left:
            left.remove(number)
            handle.cancel()

    engine.before_waiting(outbox.flush)
    with ThreadPoolExecutor(COMPILERS) as compilers, _short_turns(), only_of_new_objects():
        try:
            while True:
                message = pipe.recv()
                number = message.number
                if isinstance(message, Left):
                    if number in compiling:
                        left.add(number)
                    if number in handles:
                        handles[number].cancel()
                elif message.grammar is None:
                    take(message)
                elif (refusal := _refusal(engine, len(compiling))) is not None:
                    outbox.taken(number, refusal)  # before a core works for it
                else:
                    compiling.add(number)
                    compilers.submit(take, message)
        except (EOFError, OSError):
            pass
        left.update(compiling)
        compilers.shutdown(cancel_futures=True)
    for handle in list(handles.values()):
        handle.cancel()
    outbox.close()


def _refusal(engine: Engine, coming: int) -> Exception | None:
    """Why the engine would queue none besides so many that come, if it would not."""
    try:
        return Full("as many requests wait as may") if coming >= engine.room else None
    except Exception as error:
        return _plain(error)


def _plain(error: BaseException) -> Exception:
    """The error without its cause, which need not be one that pickles."""
    why = str(error) if error.__cause__ is None else f"{error}: {one_line(error.__cause__)}"
    kinds = (GrammarError, Full, Failed, TooLong, ValueError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
    return kind(why)
