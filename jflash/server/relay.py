"""A request passed on to a replica, and its answer passed back, as ASGI's messages.

The client of a replica that is lost meets another one, unless it has begun to read: its stream then
ends with an error event. This file knows neither Ray nor an engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jflash.server.errors import ApiError, too_late
from jflash.server.wire import DONE, body_of, last_words

LOG = logging.getLogger("jflash.server")
TRIES, PAUSE = 10, 0.5  # seconds between two; a replica that fails is gone after some
NAMED = "/v1/responses"  # its events have names
GOING = ("engine_failed", "shutting_down")  # codes of a replica that ends soon
TAKEN: Message = {"type": "jflash.taken"}  # before the answer: the request's turn has come


class Lost(Exception):
    """The replica ended before its answer did."""


class Busy(Exception):
    """No replica takes another request."""


class Asked(NamedTuple):
    """An HTTP request, whole, and the text by which a router knows equal beginnings."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes
    prompt: str


Call = Callable[[Asked], AsyncGenerator[Message]]  # raises Lost or Busy


async def asked_of(request: Request, max_body: int) -> Asked:
    """ApiError for a body that is too long or too slow."""
    scope, body = request.scope, await body_of(request, max_body)
    return Asked(
        scope["method"], scope["path"], scope["query_string"], list(scope["headers"]),
        scope.get("client"), body, _beginning(body) or scope["path"],
    )  # fmt: skip


def _beginning(body: bytes) -> str:
    """What a template puts first: tools, then messages; empty for a body without a prompt."""
    try:
        value = msgspec.json.decode(body)
        names = ("tools", "instructions", "messages", "prompt", "input")
        parts = [value[name] for name in names if value.get(name)]
    except (ValueError, RecursionError, AttributeError):  # the replica says what is wrong
        return ""
    return msgspec.json.encode(parts).decode() if parts else ""


async def messages(app: ASGIApp, asked: Asked) -> AsyncIterator[Message]:
    """TAKEN, and the answer of the replica's application. To close the iterator is to
    disconnect."""
    yield TAKEN
    given, gone = asyncio.Queue[Message | None](), asyncio.Event()
    bodies = [{"type": "http.request", "body": asked.body, "more_body": False}]

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        given.put_nowait(message)

    async def answer() -> None:
        try:
            await app(_scope(asked), receive, send)
        finally:
            given.put_nowait(None)

    task = asyncio.create_task(answer())
    try:
        while (message := await given.get()) is not None:
            yield message
        await task
    finally:
        gone.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _scope(asked: Asked) -> Scope:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": asked.method, "scheme": "http", "path": asked.path,
        "raw_path": asked.path.encode(), "query_string": asked.query, "root_path": "",
        "headers": asked.headers, "client": asked.client, "server": None, "state": {},
    }  # fmt: skip


class Relayed(Response):
    """The answer of a replica to its request; it is among `running` while it comes.

    Its request waits for a replica's turn for at most `seconds`; how long it runs is the replica's
    to say.
    """

    def __init__(self, call: Call, asked: Asked, running: "set[Relayed]", seconds: float) -> None:
        super().__init__()
        self._call, self._asked, self._running, self._seconds = call, asked, running, seconds
        self._limit: asyncio.Timeout | None = None
        self._begun: _Begun | None = None
        self._latest: float | None = None  # when a replica is to have taken it
        self._why = too_late(seconds)  # it ends when the limit does

    def end(self) -> None:
        """Ends a running answer because the server ends; its reader hears of it."""
        assert self._limit is not None
        with contextlib.suppress(RuntimeError):  # it says its last words already
            self._limit.reschedule(0)
            self._why = ApiError("the server is shutting down", status=503, code="shutting_down")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._running.discard(self)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds) as self._limit:
                self._latest = self._limit.when()
                self._running.add(self)
                await self._passed_on(send)
        except TimeoutError:
            assert self._limit is not None
            if not self._limit.expired():
                raise
            if self._begun is not None and self._begun.sent:
                await self._begun.end(self._why)
            else:
                await self._why.response()(scope, receive, send)
        except Busy as error:
            refusal = ApiError(
                f"the server is full: {error}", status=503, code="queue_full",
                headers={"Retry-After": "1"},
            )  # fmt: skip
            await refusal.response()(scope, receive, send)
        except Lost as error:
            await _words(error).response()(scope, receive, send)

    async def _passed_on(self, send: Send) -> None:
        """The first answer that does not come from a replica that ends. Lost after TRIES."""
        for last in range(TRIES, 0, -1):
            self._within(self._latest)
            self._begun = begun = _Begun(send, named=self._asked.path == NAMED)
            try:
                async with contextlib.aclosing(self._call(self._asked)) as answer:
                    async for message in answer:
                        if message == TAKEN:
                            self._within(None)
                        else:
                            await begun.take(message)
                return
            except Lost as error:
                LOG.warning("%s %s: %s", self._asked.method, self._asked.path, error)
                if begun.sent:
                    await begun.end(_words(error))
                    return
                if last == 1:
                    raise
            await asyncio.sleep(PAUSE)

    def _within(self, latest: float | None) -> None:
        """Sets the limit anew, unless the server has set it to end."""
        assert self._limit is not None
        if self._why.code == "timeout":
            with contextlib.suppress(RuntimeError):  # it is over
                self._limit.reschedule(latest)


class _Begun:
    """Sends an answer on, its head together with the first piece of its body."""

    def __init__(self, send: Send, named: bool) -> None:
        self._send, self._named, self._head = send, named, dict[str, Any]()
        self.sent = self._whole = False
        self._events = 0  # of a stream

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = dict(message)
            return
        if not self.sent:
            self._check(message.get("body", b""))
            self.sent = True
            await self._send(self._head)
        self._whole = not message.get("more_body", False)
        self._events += message.get("body", b"").count(b"\n\n")  # with which each ends
        await self._send(message)

    def _check(self, body: bytes) -> None:
        if self._head["status"] == 503:
            error = msgspec.json.decode(body)["error"]
            if error["code"] in GOING:
                raise Lost(error["message"])

    async def end(self, words: ApiError) -> None:
        """The last words of an answer that cannot go on."""
        if self._whole:
            return
        body = last_words(words, self._events) if self._named else last_words(words) + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _words(error: Lost) -> ApiError:
    return ApiError(f"the replica was lost: {error}", status=503, code="replica_lost")
