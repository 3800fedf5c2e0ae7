"""HTTP as httptools reads it, which takes a head of any length: here it has a bound."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def bounded(most: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, but 400 and the connection's end for a head of more than `most` bytes."""

    class Bounded(HttpToolsProtocol):
        _in_head, _head = True, 0  # the bytes of a head that is not whole

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._head = self._head + len(data) if self._in_head else 0
            if self._head > most and not self.transport.is_closing():
                self.send_400_response(f"the head has more than {most} bytes")

    return Bounded
