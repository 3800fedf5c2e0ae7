"""HTTP as httptools reads it: a head has a bound here, and a wish for another protocol is ignored.

httptools takes a head of any length. It also takes what follows a head with `Upgrade` for the other
protocol, and Java's HTTP client asks for HTTP/2 in this way with each first request, body and all.
uvicorn beside it writes a stream in chunks to HTTP/1.0 too, where their sizes would be text. Once a
request waits for the answer to an older one, it reads nothing more, not even that the client goes.
"""

import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

AHEAD = 8  # requests that a connection may have beside the one that runs


def bounded(most: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, but 400 and the connection's end for a head of more than `most` bytes,
    HTTP/1.1 for who asks for more, and no chunks for who asks for less."""

    class Bounded(HttpToolsProtocol):
        _in_head, _head = True, 0  # the bytes of a head that is not whole
        _data, _ended = b"", False  # the newest, and whether a request ends in it
        _open: tuple[RequestResponseCycle, ...] = ()  # requests without their whole answers

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()
            cycle = self.cycle
            if cycle is None or cycle.scope is not self.scope:
                return  # of a request with a wish for another protocol, which is read again
            self._open = (*(each for each in self._open if not each.response_complete), cycle)
            if len(self.pipeline) <= AHEAD:
                self.flow.resume_reading()
            if self.scope["http_version"] == "1.0":
                _write_without_chunks(cycle)

        def on_message_complete(self) -> None:
            self._ended = True
            super().on_message_complete()

        def data_received(self, data: bytes) -> None:
            self._data, self._ended = data, False
            super().data_received(data)
            # A client may send the next head right after a body, which is no part of it.
            self._head = self._head + len(data) if self._in_head and not self._ended else 0
            if self._head > most and not self.transport.is_closing():
                self.send_400_response(f"the head has more than {most} bytes")

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)  # tells it to the newest one alone
            for cycle in self._open:
                cycle.disconnected = not cycle.response_complete
                cycle.message_event.set()

        def _should_upgrade(self) -> bool:
            """uvicorn leaves such a request to `handle_websocket_upgrade`."""
            return any(name == b"upgrade" for name, _ in self.headers)

        def handle_websocket_upgrade(self) -> None:
            """Reads the request again without its wish, and then what came after its head."""
            asks = sys.exception()
            assert isinstance(asks, httptools.HttpParserUpgrade), "uvicorn calls this for one"
            line = f"{self.scope['method']} ".encode() + self.url
            fields = [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
            version = self.scope["http_version"].encode()
            head = b"\r\n".join([line + b" HTTP/" + version, *fields, b"", b""])
            # The one before has seen the end of a request, with some the end of the connection.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.data_received(head + self._data[asks.args[0] :])

    return Bounded


def _write_without_chunks(cycle: RequestResponseCycle) -> None:
    """Has an answer written as it is, up to the connection's end."""
    write, cycle.chunked_encoding = cycle.send, False

    async def send(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))  # no more, and no less
        await write(message)

    cycle.send = send
