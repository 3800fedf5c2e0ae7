"""What the ingress of a fleet says itself, while its replicas may have no room for a question.

This file knows neither Ray nor an engine.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jflash.server.app import OF_PAGES
from jflash.server.errors import ApiError, json_response

WELL, READY = "/health", "/health/ready"


class ForPages(Response):
    """An answer that pages of these origins may read, be it a replica's or the ingress's own."""

    def __init__(self, answer: Response, origins: Sequence[str]) -> None:
        super().__init__()
        self._told = CORSMiddleware(answer, allow_origins=list(origins), **OF_PAGES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._told(scope, receive, send)


def health(path: str, working: int, waiting: int, most: int) -> Response:
    """To WELL 200 while a replica works; to READY if of `most` requests another may wait, too.

    No replica is asked: one that has all its requests would let a probe wait behind them.
    """
    if not working:
        raise ApiError("no replica works", status=503, code="replica_lost")
    if path == READY and waiting >= most:
        raise ApiError("the queue is full", status=503, code="queue_full")
    return json_response({"status": "ok"})
