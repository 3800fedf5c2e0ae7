"""What the ingress of a fleet says itself, while its replicas may have no room for a question.

This file knows neither Ray nor an engine.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jflash.server.about import ROUTES, About
from jflash.server.app import OF_PAGES, figures_page, wrapped
from jflash.server.errors import ApiError, json_response
from jflash.server.metrics import of_replicas

WELL, READY = "/health", "/health/ready"
SILENT = 30.0  # seconds after which a replica that says nothing is taken for gone


class News(NamedTuple):
    """What a replica says of itself now and then, with its figures for Prometheus."""

    replica: str
    about: About
    api_keys: list[str]  # of those who may ask; everyone without one
    figures: bytes


class Known:
    """What replicas have said of themselves, and the answers that are made of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._heard = clock, dict[str, tuple[float, News]]()
        self._newest: News | None = None
        self._app: Starlette | None = None

    def hear(self, news: News) -> None:
        """Takes a replica's news. The newest replica says what the fleet is: a deployment may
        replace others by it."""
        now = self._clock()
        self._heard[news.replica] = now, news
        heard = self._heard.items()
        self._heard = {one: it for one, it in heard if now - it[0] <= SILENT}
        newest = max((it for _, it in self._heard.values()), key=lambda it: it.about.created)
        if self._newest is None or newest.replica != self._newest.replica:
            routes = [*ROUTES, Route("/metrics", self._metrics)]
            self._newest, self._app = newest, wrapped(routes, newest.about, newest.api_keys)

    def answer(self, scope: Scope) -> Response | None:
        """The answer to a request that needs no replica; None to others, and as long as no replica
        has said anything."""
        if self._app is None:
            return None
        known = any(route.matches(scope)[0] != Match.NONE for route in self._app.routes)
        return Of(self._app) if known else None

    async def _metrics(self, _: Request) -> Response:
        now = self._clock()
        heard = {one: it.figures for one, (at, it) in self._heard.items() if now - at <= SILENT}
        return figures_page(of_replicas(heard))


class Of(Response):
    """The answer of an application."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class ForPages(Of):
    """An answer that pages of these origins may read, be it a replica's or the ingress's own."""

    def __init__(self, answer: Response, origins: Sequence[str]) -> None:
        super().__init__(CORSMiddleware(answer, allow_origins=list(origins), **OF_PAGES))


def health(path: str, working: int, waiting: int, most: int) -> Response:
    """To WELL 200 while a replica works; to READY if of `most` requests another may wait, too.

    No replica is asked: one that has all its requests would let a probe wait behind them.
    """
    if not working:
        raise ApiError("no replica works", status=503, code="replica_lost")
    if path == READY and waiting >= most:
        raise ApiError("the queue is full", status=503, code="queue_full")
    return json_response({"status": "ok"})
