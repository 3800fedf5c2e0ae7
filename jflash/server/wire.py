"""Bodies in and events out: sizes, timeouts, disconnects. This file knows no model and no route."""

import asyncio
import contextlib
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
)
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jflash.server.errors import ApiError

BODY_SECONDS = 30.0  # for a body to arrive
MOST_AT_ONCE = 16  # events of one write
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has disconnected."""


async def body_of(request: Request, most: int) -> bytes:
    """The whole body; ApiError if it is too long or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise ApiError(
                        f"the body has more than {most} bytes", status=413, code="body_too_large",
                        headers={"Connection": "close"},
                    )  # fmt: skip
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive in {BODY_SECONDS:g} seconds", status=408, code="timeout"
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


async def while_there[T](request: Request, work: Awaitable[T]) -> T:
    """The work's result; a disconnect cancels the work and raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """Server-sent events, one for each value; an ApiError becomes the last one.

    `at_end` is called at the end in any case, even if the client went before the first event. The
    answer ends after `seconds`, however slowly the client reads.
    """

    def __init__(
        self,
        values: AsyncIterator[object],
        at_end: Callable[[], None],
        *,
        seconds: float,
        done: bytes = DONE,
        named: bool = False,
    ) -> None:
        super().__init__(
            _encoded(values, done, named), media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )  # fmt: skip
        self._at_end, self._seconds = at_end, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # the server closes the connection of an answer without an end
            pass
        finally:
            self._at_end()


async def _encoded(values: AsyncIterator[object], done: bytes, named: bool) -> AsyncIterator[bytes]:
    encoder = msgspec.json.Encoder()

    def event(value: object) -> bytes:
        name = b""
        if named and isinstance(value, dict):
            name = b"event: " + value["type"].encode() + b"\n"
        return name + b"data: " + encoder.encode(value) + b"\n\n"

    try:
        async for several in at_once(values):
            yield b"".join(map(event, several))
    except ApiError as error:
        yield last_words(error, named)
    yield done


def last_words(error: ApiError, named: bool = False) -> bytes:
    """The event of a stream that cannot go on."""
    name = b"event: error\n" if named else b""
    return name + b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


async def at_once[T](values: AsyncIterator[T]) -> AsyncGenerator[list[T]]:
    """The values in lists of those that are there without waiting, MOST_AT_ONCE at most.

    A call of the engine brings several steps, and a write costs more than an event.
    """

    async def following() -> T:
        return await anext(values)

    ready, begun = list[T](), None
    try:
        while True:
            begun = following()
            try:
                waits_for = begun.send(None)
            except StopIteration as there:  # it did not wait
                ready.append(there.value)
                if len(ready) == MOST_AT_ONCE:
                    yield ready
                    ready = []
                continue
            except Exception as error:
                if ready:
                    yield ready
                if isinstance(error, StopAsyncIteration):
                    return
                raise
            if ready:
                yield ready
                ready = []
            try:
                ready.append(await _Rest(begun, waits_for))
            except StopAsyncIteration:
                return
    finally:
        if begun is not None and inspect.getcoroutinestate(begun) == inspect.CORO_SUSPENDED:
            # The reader went while the next value was waited for.
            with contextlib.suppress(asyncio.CancelledError):
                begun.throw(asyncio.CancelledError())


class _Rest:
    """Awaits what is left of a coroutine that waits for a future already. A task costs more."""

    def __init__(self, begun: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._begun, self._waits_for = begun, waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = self._begun.throw(error)
                else:
                    waits_for = self._begun.send(sent)
        except StopIteration as done:
            return done.value
