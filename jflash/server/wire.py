"""Bodies in and events out: sizes, timeouts, disconnects. This file knows no model and no route."""

import asyncio
import contextlib
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jflash.server.errors import ApiError

BODY_SECONDS = 30.0  # for a body to arrive
DONE = b"data: [DONE]\n\n"
ENCODER = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client has disconnected."""


async def body_of(request: Request, most: int) -> bytes:
    """The whole body, without the mark that some editors put before UTF-8; ApiError if it is too
    long, too slow or compressed."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise ApiError(
            f"Content-Encoding {coding:.40}: send the body as it is, without one", status=415,
            code="unsupported_encoding", headers={"Accept-Encoding": "identity"},
        )  # fmt: skip
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    # The connection goes on, and what still comes is dropped: one that was closed
                    # would be reset for a client that writes all before it reads.
                    raise ApiError(
                        f"the body has more than {most} bytes", status=413, code="body_too_large"
                    )
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive in {BODY_SECONDS:g} seconds", status=408, code="timeout",
            headers={"Connection": "close"},  # what comes later is no request's beginning
        ) from None  # fmt: skip
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body.removeprefix(BOM_UTF8))


async def while_there[T](request: Request, work: Awaitable[T]) -> T:
    """The work's result; a disconnect cancels the work and raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """Server-sent events, one for each value; an ApiError becomes the last one.

    `values` come in lists, each of which is one write. `at_end` is called at the end in any case,
    even if the client went before the first event. The answer ends after `seconds`, however slowly
    the client reads.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        values: AsyncGenerator[Sequence[object]],
        at_end: Callable[[], None],
        *,
        seconds: float,
        done: bytes = DONE,
        named: bool = False,
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._values, self._at_end, self._seconds = values, at_end, seconds
        self._done, self._named = done, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = asyncio.ensure_future(self._tell(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            # The server closes the connection of an answer without an end.
            await asyncio.wait(
                [told, gone], timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if told.done():
                told.result()
        finally:
            gone.cancel()
            told.cancel()
            self._at_end()

    async def _tell(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        count = 0
        async with contextlib.aclosing(self._values) as values:
            try:
                async for several in values:
                    count += len(several)
                    body = b"".join([self._event(value) for value in several])
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except ApiError as error:
                body = last_words(error, count if self._named else None)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": self._done, "more_body": False})

    def _event(self, value: object) -> bytes:
        name = b""
        if self._named and isinstance(value, dict):
            name = b"event: " + value["type"].encode() + b"\n"
        return name + b"data: " + ENCODER.encode(value) + b"\n\n"


def last_words(error: ApiError, number: int | None = None) -> bytes:
    """The event of a stream that cannot go on; with names, its `number` among all events.

    OpenAI's documents give an event with a name the error's fields themselves, and its SDKs raise
    what stands under `error`: it has both.
    """
    value, name = error.body(), b""
    if number is not None:
        fields = {field: value["error"][field] for field in ("code", "message", "param")}
        value = {"type": "error", "sequence_number": number} | fields | value
        name = b"event: error\n"
    return name + b"data: " + ENCODER.encode(value) + b"\n\n"
