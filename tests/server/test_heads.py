"""Requests as their bytes come: one after another in the same piece."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jflash.server.run import HEADER_BYTES, listen, open_to_clients, server_of


async def length(request: Request) -> Response:
    """How long the body is."""
    return Response(str(len(await request.body())))


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    app = Starlette(routes=[Route("/length", length, methods=["POST"])])
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
