"""The server's process: it listens, drains at SIGTERM, and watches the device."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette

from jflash.server.service import Service
from jflash.serving.request import Failed

LOG = logging.getLogger("jflash.server")
LOOK_EVERY = 0.5  # seconds between two looks at the engine
SOON = 0.1  # seconds, as often as uvicorn looks
LAST_WORDS = 2.0  # seconds for a server that ends to end its answers with the error
HEADER_BYTES = 64 * 1024  # of a request's head
# Seconds for which a connection may be idle, longer than clients keep one for their next request:
# Go's 90, aiohttp's 15, and OpenAI's SDK 5, which is also what uvicorn's own are. Who writes into
# one that closes is reset, and cannot know whether its request has begun.
IDLE_SECONDS = 120
SWITCH = 0.0001  # Python's default lets the engine's thread wait 5 ms at each of its system calls


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, made before a weight is read: `open_to_clients` lets them in. ValueError if
    host or port cannot be bound."""
    try:
        [info, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"--host {host}: {error.strerror}") from None
    listener = socket.socket(info[0], info[1])
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(info[4])
    except OSError as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None
    # Linux binds a port again for sockets that all have the option, as long as none listens.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return listener


def open_to_clients(listener: socket.socket) -> None:
    """Whoever connects from now on waits for the server; ValueError if another one has the port."""
    # Connections inherit the option: the last ones would keep the port from the next server.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None


def url_of(host: str, port: int) -> str:
    """Where clients find a server; a host of IPv6 stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s", force=True
    )
    logging.getLogger("jflash").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def server_of(app: Starlette, shutdown_timeout: float) -> uvicorn.Server:
    """The HTTP server, which `serve` runs. From now on threads take turns in SWITCH seconds."""
    sys.setswitchinterval(SWITCH)
    config = uvicorn.Config(
        app, http=_protocol(), log_config=None, access_log=False, server_header=False,
        lifespan="off", timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=math.ceil(shutdown_timeout + LAST_WORDS),
        h11_max_incomplete_event_size=HEADER_BYTES,
    )  # fmt: skip
    return uvicorn.Server(config)


def _protocol() -> "type[asyncio.Protocol] | Literal['h11']":
    """httptools' if it is installed, as by the extra `serve`: it saves an eighth of a chunk's time
    (5,000 chunks to 32 clients, on two cores)."""
    try:
        from jflash.server.heads import bounded
    except ModuleNotFoundError as missing:
        if missing.name != "httptools":
            raise
        return "h11"
    return bounded(HEADER_BYTES)


def serve(
    app: Starlette,
    service: Service,
    listener: socket.socket,
    *,
    shutdown_timeout: float,
    hang_timeout: float,
    beside: contextlib.AbstractAsyncContextManager | None = None,
) -> bool:
    """Serves until SIGTERM or SIGINT, then ends requests within `shutdown_timeout` seconds, all
    within `beside`.

    False if the engine failed, or made no progress on requests for `hang_timeout` seconds.
    """
    server = server_of(app, shutdown_timeout)

    async def main() -> None:
        def end() -> None:
            server.should_exit = True

        watched = _beside(watch(service, hang_timeout, end))
        drained = _beside(_drain(service, server, shutdown_timeout))
        async with beside or contextlib.nullcontext(), watched, drained:
            await server.serve(sockets=[listener])

    with _signals_end_there():
        asyncio.run(main())
    return not service.failures


@contextlib.contextmanager
def _signals_end_there():
    """Ignores the signals that uvicorn raises again after they ended it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


async def _drain(service: Service, server: uvicorn.Server, seconds: float) -> None:
    """Cancels the requests that still run so many seconds after the server was told to end, and
    those that wait for their grammars: their readers hear of it, before uvicorn cuts off who has
    not."""
    while not server.should_exit:
        await asyncio.sleep(SOON)
    await asyncio.sleep(seconds)
    while True:
        for each in (*service.pending, *service.live):
            each.cancel()
        await asyncio.sleep(SOON)  # others may have been about to be submitted


async def watch(service: Service, hang_timeout: float, end: Callable[[], None]) -> None:
    """Ends the server, after its last words, once the engine has failed or hangs."""
    seen, since = None, time.monotonic()
    while not service.failures:
        await asyncio.sleep(LOOK_EVERY)
        stats, unanswered = service.engine.stats(), service.engine.unanswered()
        now = unanswered  # of an engine that has nothing to do, as far as it has said
        if busy := stats.running + stats.waiting:
            now = (stats.new_tokens, stats.computed, stats.prompt_tokens, sum(stats.ended.values()))
        if now != seen or not (busy or unanswered is not None):
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > hang_timeout:
            hung = Failed(f"the device has not answered for {hang_timeout:g} seconds")
            service.failures.append(str(hung))
            service.engine.give_up(hung)
            for handle in list(service.live):
                handle.fail(hung)
    LOG.error("ends: %s", service.failures[0])
    await asyncio.sleep(LAST_WORDS)
    end()
