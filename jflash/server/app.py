"""The routes, and what wraps every request: keys, errors, a log line.

This file knows the engine only through `Service`.
"""

import hmac
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jflash.server.about import ROUTES, About
from jflash.server.chat import chat
from jflash.server.completions import completions
from jflash.server.conversation import prompt_text
from jflash.server.errors import ApiError, invalid, json_response
from jflash.server.protocol import Detokenize, Tokenize, read
from jflash.server.responses import responses
from jflash.server.service import Service
from jflash.server.thinking import thinking
from jflash.server.tools import wanted
from jflash.server.wire import ClientGone, body_of

ACCESS = logging.getLogger("jflash.access")
OPEN_PATHS = ("/", "/health", "/health/ready")  # without a key; the page asks for it
# What pages of allowed origins may send.
OF_PAGES: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
CLIENT_GONE = 499  # only in the log, as in nginx's


def make_app(
    service: Service, *, api_keys: Sequence[str] = (), origins: Sequence[str] = ()
) -> Starlette:
    """The application; without `api_keys` every client may ask, without `origins` no other page."""
    routes = [
        *ROUTES,
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/health", _health),
        Route("/health/ready", _ready),
        Route("/metrics", _metrics),
    ]
    app = wrapped(routes, service.about, api_keys, origins)
    app.state.service = service
    return app


def wrapped(
    routes: Sequence[Route], about: About, api_keys: Sequence[str], origins: Sequence[str] = ()
) -> Starlette:
    """An application of these routes, with what wraps each request."""
    middleware = [Middleware(_AccessLog)]
    if origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(origins), **OF_PAGES))
    if api_keys:
        middleware.append(Middleware(_Keys, keys=[key.encode() for key in api_keys]))
    # Starlette has one outside of all others, where another page may not read what it answers.
    middleware.append(Middleware(ServerErrorMiddleware, handler=_broken))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: _refused, ClientGone: _left, HTTPException: _http_error, Exception: _broken
        },
    )  # fmt: skip
    app.state.about = about
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


async def _tokenize(request: Request) -> Response:
    service = _service(request)
    asked = read(await body_of(request, service.max_body), Tokenize)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if asked.messages is not None:
        names = thinking(service, None, asked.chat_template_kwargs or {})
        tools = wanted(asked.tools, None, service.template)
        write = partial(prompt_text, service, asked.messages, tools, names)
        ids = await service.encode(await service.beside(len(asked.messages), write), False)
    else:
        assert asked.prompt is not None
        ids = await service.encode(asked.prompt, asked.add_special_tokens is not False)

    def answer() -> Response:
        strings = service.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        known = {"count": len(ids), "max_model_len": service.engine.max_context}
        return json_response(known | {"tokens": ids, "token_strs": strings})

    return await service.beside(len(ids), answer)


async def _detokenize(request: Request) -> Response:
    service = _service(request)
    asked = read(await body_of(request, service.max_body), Detokenize)
    service.check_model(asked.model)
    outside = [i for i in asked.tokens if i >= service.vocabulary]
    if outside:
        raise invalid("tokens", f"{outside[0]} is outside the {service.vocabulary} ids")

    def answer() -> Response:
        text = service.tokenizer.decode(asked.tokens, clean_up_tokenization_spaces=False)
        return json_response({"prompt": text})

    return await service.beside(len(asked.tokens), answer)


async def _health(request: Request) -> Response:
    """200 while the device works, then 503."""
    failures = _service(request).failures
    if failures:
        raise ApiError(failures[0], status=503, code="engine_failed")
    return json_response({"status": "ok"})


async def _ready(request: Request) -> Response:
    """200 if the queue would take a request now, else 503."""
    service = _service(request)
    if service.engine.stats().waiting >= service.max_queue:
        raise ApiError("the queue is full", status=503, code="queue_full")
    return await _health(request)


async def _metrics(request: Request) -> Response:
    return figures_page(_service(request).metrics.text())


def figures_page(text: bytes) -> Response:
    """The answer to Prometheus."""
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _left(*_: object) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's refusals: unknown paths, and methods that a path does not have."""
    assert isinstance(error, HTTPException)
    # The URL of a path that begins with two slashes has its first part as the host.
    message = f"{request.method} {request.scope['path']}: {error.detail}"
    headers = dict(error.headers or {})
    return ApiError(message, status=error.status_code, headers=headers).response()


async def _broken(_: Request, error: Exception) -> Response:
    """An internal error; starlette logs its traceback after this answer."""
    return ApiError("the server made a mistake; its log says which", status=500).response()


class _Keys:
    """Passes on requests with one of the keys, compared in constant time."""

    def __init__(self, app: ASGIApp, keys: list[bytes]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            right = [hmac.compare_digest(key.strip(), one) for one in self._keys]
            if scheme.lower() != b"bearer" or not any(right):
                refusal = ApiError(
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                return await refusal.response()(scope, receive, send)
        await self._app(scope, receive, send)


class _AccessLog:
    """Logs one line for each finished request, without its text."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin, status = self._clock(), CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})
        try:
            await self._app(scope, receive, watched)
        finally:
            usage = scope["state"].get("usage")
            cost = ""
            if usage is not None:
                cost = f" prompt {usage.prompt} new {usage.new} steps {usage.steps}"
            client = (scope.get("client") or ("-",))[0]
            ACCESS.info(
                "%s %s %s %d %.3f s%s", client, scope["method"], ascii(scope["path"])[1:-1],
                status, self._clock() - begin, cost,
            )  # fmt: skip
