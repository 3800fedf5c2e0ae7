"""A fleet on Ray Serve: an ingress without a model, and replicas of the server of `jflash serve`.

The ingress passes a request on to the replica that has read its beginning, which Ray's tree of
prefixes knows, unless another one has far less to do. Replicas are counted by the requests that run
and wait. One that fails, hangs or dies is replaced, and one that a new deployment replaces answers
what it has taken. This file knows the server only through ASGI.
"""

# pyright: reportMissingImports=false
# Ray is an extra that `dev` lacks.

import argparse
import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from jflash.cli.jax_setup import configure_jax, platform_options
from jflash.cli.main import make_parser
from jflash.cli.options import serve as serve_options
from jflash.cli.options.by_name import argv_of, refuse_of_ray, with_absolute_places
from jflash.cli.served import FAILED, api_keys, counted_compilations, loaded
from jflash.io.foreign import one_line
from jflash.server.about import About
from jflash.server.app import CLIENT_GONE, make_app
from jflash.server.errors import ApiError
from jflash.server.fleet import READY, WELL, ForPages, Known, News, health
from jflash.server.relay import Asked, Busy, Lost, Relayed, asked_of, messages
from jflash.server.run import LAST_WORDS, LOOK_EVERY, log_to_stderr, watch
from jflash.server.service import service_of
from jflash.server.wire import ClientGone
from jflash.serving.decoder import Local
from jflash.system.replicas import gpus_of

LOG = logging.getLogger("jflash.server")
NAME = "jflash"
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # a replica logs its requests
# Its public name imports vLLM or SGLang.
ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router."
    "PrefixCacheAffinityRouter"
)
TREE = {"do_eviction": True}  # its limits are Ray's defaults
CHECK, CHECK_TIMEOUT = 5.0, 30.0  # seconds
AT_ONCE = 2  # requests that a replica takes for each of its slots
MANY = 10_000  # requests that the ingress passes on at once


class Replica:
    """One pair with its engine and its routes."""

    def __init__(self, options: argparse.Namespace) -> None:
        log_to_stderr()
        configure_jax(options)
        self._options, found = options, loaded(options)
        self._service = service_of(found.settings, Local(found.engine))
        counted_compilations(self._service.metrics.compiled.inc)
        self._keys = api_keys(options)
        self._app = make_app(self._service, api_keys=self._keys)
        self._beside = list[asyncio.Task]()

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        async for message in messages(self._app, asked):
            yield message

    async def check_health(self) -> None:
        """Ray asks now and then; a replica that failed or hangs ends, with its process."""
        if not self._beside:
            service = self._service
            ends = watch(service, self._options.hang_timeout, lambda: os._exit(FAILED))
            tells = tell(service.about, self._keys, service.metrics.text)
            self._beside = [asyncio.create_task(each) for each in (ends, tells)]
        if self._service.failures:
            raise RuntimeError(self._service.failures[0])

    def __del__(self) -> None:
        if hasattr(self, "_service"):  # not where the pair could not be loaded
            self._service.engine.close()


async def tell(about: About, keys: list[str], figures: Callable[[], bytes]) -> None:
    """Tells the ingress of a replica's fleet, now and then, what the replica is and has counted: a
    question for it would wait behind requests."""
    me = serve.get_replica_context()
    while True:
        try:
            ingress = serve.get_deployment_handle("ingress", me.app_name)
            await ingress.hear.remote(News(me.replica_id.unique_id, about, keys, figures()))
        except Exception as error:  # Ray has many; the next ingress hears it
            LOG.warning("the ingress does not hear a replica: %s", one_line(error))
        await asyncio.sleep(CHECK)


class Ingress:
    """What clients reach: it has no model, and asks again where a replica was lost."""

    def __init__(self, replicas: Any, options: argparse.Namespace) -> None:
        self._replicas, self._options = replicas.options(stream=True), options
        self._running, self._closing = set[Relayed](), False
        self._known = Known()
        self._app = serve.get_replica_context().app_name

    async def __call__(self, request: Request) -> Response:
        answer, origins = await self._answer(request), self._options.allow_origin
        return ForPages(answer, origins) if origins else answer

    async def _answer(self, request: Request) -> Response:
        try:
            if self._closing:
                raise ApiError("the server ends", status=503, code="shutting_down")
            path = request.scope["path"]
            if path in (WELL, READY) and request.method in ("GET", "HEAD"):
                return await self._health(path)
            if answer := self._known.answer(request.scope):
                return answer
            options = self._options
            asked = await asked_of(request, options.max_body)
            return Relayed(self._call, asked, self._running, options.request_timeout)
        except ApiError as error:
            return error.response()
        except ClientGone:
            return Response(status_code=CLIENT_GONE)

    async def _health(self, path: str) -> Response:
        o, working = self._options, await asyncio.to_thread(_working, self._app)
        waiting = len(self._running) - AT_ONCE * o.max_batch * working
        return health(path, working, waiting, o.max_queue * (o.replicas or 1))

    async def hear(self, news: News) -> None:
        self._known.hear(news)

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and returns when the others have ended: after `seconds` those that
        still run end with an error."""
        self._closing = True
        await self._ended_within(seconds)
        for answer in self._running:
            answer.end()
        await self._ended_within(LAST_WORDS)

    async def _ended_within(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            await asyncio.sleep(LOOK_EVERY)

    async def _call(self, asked: Asked) -> AsyncGenerator[Message]:
        answer = self._replicas.answer.remote(asked)
        try:
            async for message in answer:
                yield message
        except BackPressureError as error:
            raise Busy(one_line(error)) from None
        except RayActorError as error:
            LOG.warning("%s", one_line(error))
            raise Lost("it ended before its answer did") from None
        except (GeneratorExit, asyncio.CancelledError):  # its client is gone
            answer.cancel()  # which raises Ray's error of an answer that has failed
            raise


def _working(app: str) -> int:
    """How many replicas of an application work, as far as Ray has seen."""
    states = serve.status().applications[app].deployments["replica"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def app(args: dict[str, Any]) -> serve.Application:
    """The application of `serve run jflash.serving.ray:app` and of `serve deploy`.

    `args` are options of `jflash serve` without their dashes: target=…, replicas=2; a flag's value
    is true or false. The cluster is that of RAY_ADDRESS, or of this machine.
    """
    refuse_of_ray(args)
    parser = make_parser("serve", "jflash.serving.ray:app")
    platform_options(parser)
    options = parser.parse_args(argv_of(parser, with_absolute_places(args)))
    serve_options.check(options)
    if not ray.is_initialized():  # `serve run` would be later than the question for GPUs
        ray.init(namespace="serve")
    return application(options)


def application(options: argparse.Namespace) -> serve.Application:
    """The deployments that the options describe, for the cluster that Ray is connected to."""
    batch, count = options.max_batch, options.replicas or 1
    numbers: dict[str, Any] = {"num_replicas": count}
    if options.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=count, max_replicas=options.max_replicas, target_ongoing_requests=batch
        )
        numbers = {"autoscaling_config": scaling}
    kwargs = TREE | {"imbalanced_threshold": batch}
    router: dict[str, Any] = {"request_router_class": ROUTER, "request_router_kwargs": kwargs}
    replicas = serve.deployment(
        Replica, name="replica", logging_config=QUIET,
        max_ongoing_requests=AT_ONCE * batch, max_queued_requests=options.max_queue * count,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus_of(options.tensor_parallel)},
        health_check_period_s=CHECK, health_check_timeout_s=CHECK_TIMEOUT,
        graceful_shutdown_timeout_s=options.shutdown_timeout, graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(**router), **numbers,
    )  # fmt: skip
    ingress = serve.deployment(
        Ingress, name="ingress", logging_config=QUIET, num_replicas=1, max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.shutdown_timeout, graceful_shutdown_wait_loop_s=0.5,
    )  # fmt: skip
    return ingress.bind(replicas.bind(options), options)
