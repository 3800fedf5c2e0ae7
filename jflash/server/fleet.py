"""What the ingress of a fleet says itself, while its replicas may have no room for a question.

This file knows neither Ray nor an engine.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jflash.server.app import OF_PAGES


class ForPages(Response):
    """An answer that pages of these origins may read, be it a replica's or the ingress's own."""

    def __init__(self, answer: Response, origins: Sequence[str]) -> None:
        super().__init__()
        self._told = CORSMiddleware(answer, allow_origins=list(origins), **OF_PAGES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._told(scope, receive, send)
