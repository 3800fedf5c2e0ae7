"""Requests as their bytes come: one after another in the same piece, and of an older version."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jflash.server.run import HEADER_BYTES, listen, open_to_clients, server_of

WAITING, LEFT = threading.Event(), threading.Event()


async def length(request: Request) -> Response:
    """How long the body is."""
    return Response(str(len(await request.body())))


async def wait(request: Request) -> Response:
    """Says that it waits for its client's end, and that this has come."""
    WAITING.set()
    while (await request.receive())["type"] != "http.disconnect":
        pass
    LEFT.set()
    return Response()


async def stream(_: Request) -> Response:
    return StreamingResponse(iter(["one\n", "two\n"]))


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    routes = [Route("/length", length, methods=["POST"]), Route("/stream", stream)]
    app = Starlette(routes=[*routes, Route("/wait", wait)])
    server, listener = server_of(app, 1.0), listen("127.0.0.1", 0)
    open_to_clients(listener)
    run = lambda: asyncio.run(server.serve(sockets=[listener]))  # noqa: E731
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield listener.getsockname()[:2]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def request(body: bytes, field: bytes = b"x: y") -> bytes:
    head = [b"POST /length HTTP/1.1", b"host: x", field, b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, b"", body])


def read(client: socket.socket, until: bytes) -> bytes:
    """What the server sends, up to this or the connection's end."""
    client.settimeout(20)
    got = b""
    while until not in got and (more := client.recv(2**16)):
        got += more
    return got


def test_a_body_is_no_part_of_the_head_that_follows_it(address):
    body, field = b"a" * (HEADER_BYTES + 1), b"x: " + b"y" * 1000
    with socket.create_connection(address) as client:
        next_one = request(b"bc", field)
        client.sendall(request(body) + next_one[:500])
        assert read(client, b"%d" % len(body)).startswith(b"HTTP/1.1 200"), "the first answer"
        client.sendall(next_one[500:])
        assert read(client, b"\r\n\r\n2").startswith(b"HTTP/1.1 200"), "and the second"


def test_a_head_that_follows_another_request_has_its_bound(address):
    with socket.create_connection(address) as client:
        client.sendall(request(b"") + b"POST /length HTTP/1.1\r\nx: ")
        assert read(client, b"\r\n\r\n0").startswith(b"HTTP/1.1 200")
        client.sendall(b"y" * (HEADER_BYTES + 1000))
        assert read(client, b"\r\n\r\n").startswith(b"HTTP/1.1 400"), "it has no end"


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks(address):
    """It ends with its connection, as does an answer whose length is told."""
    for line, body in (
        (b"GET /stream HTTP/1.0", b"one\ntwo\n"),
        (b"HEAD /stream HTTP/1.0", b""),
        (b"POST /length HTTP/1.0\r\ncontent-length: 2", b"2"),
    ):
        with socket.create_connection(address) as client:
            tail = b"ab" if line.startswith(b"POST") else b""
            client.sendall(line + b"\r\n\r\n" + tail)
            head, _, got = read(client, b"no such text").partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and got == body, line
            assert b"transfer-encoding" not in head and b"connection: close" in head
    with socket.create_connection(address) as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"\r\n\r\n4\r\none\n\r\n4\r\ntwo\n\r\n0\r\n" in read(client, b"\r\n0\r\n")


def test_an_idle_connection_stays_longer_than_clients_keep_it(address, monkeypatch):
    """Those of Go keep one for 90 seconds. The server's own clock says when it would close it."""
    closes, later = SimpleQueue[float](), asyncio.BaseEventLoop.call_later

    def heard(loop: asyncio.BaseEventLoop, seconds: float, work: Callable, *args: Any, **how: Any):
        if getattr(work, "__name__", "") == "timeout_keep_alive_handler":
            closes.put(seconds)
        return later(loop, seconds, work, *args, **how)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", heard)
    with socket.create_connection(address) as client:
        client.sendall(request(b"ab"))
        assert read(client, b"\r\n\r\n2").startswith(b"HTTP/1.1 200")
        assert closes.get(timeout=20) > 90


def test_a_request_hears_of_its_clients_end_while_another_one_waits_behind_it(address):
    with socket.create_connection(address) as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        assert WAITING.wait(20)
        client.sendall(request(b"a") + request(b"bc"))
        assert not LEFT.wait(0.2), "it runs, and the others wait"
    assert LEFT.wait(20)
