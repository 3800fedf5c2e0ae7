"""`jflash serve --replicas N`: what it refuses, a Ray of this machine, and the end at signals.

This file knows the fleet as an application whose ingress drains.
"""

# pyright: reportMissingImports=false
# Ray is an extra that `dev` lacks.

import argparse
import logging
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from ray import serve
from ray.serve.schema import DeploymentStatus

from jflash.cli.options.pair import drafter_choice, drafter_name
from jflash.cli.served import api_keys, context_of, template_of
from jflash.devices.mesh import check_divisible
from jflash.io import open_checkpoint, pair_models
from jflash.io.foreign import one_line
from jflash.server.run import LAST_WORDS, listen, url_of
from jflash.serving.ray import NAME, QUIET, application
from jflash.system.replicas import cluster


def serve_replicas(options: argparse.Namespace) -> None:
    """`jflash serve --replicas N`: until SIGTERM, and then until the requests have ended."""
    listener = listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    listener.close()  # Ray's proxy listens
    source, _ = drafter_choice(drafter_name(options))
    # Refused here, before Ray begins: what is not there, or does not fit or divide.
    target = open_checkpoint(options.target)
    models = pair_models(target, source, options.block_size)
    context_of(options, models)
    template_of(options, target.tokenizer())
    api_keys(options)
    if options.tensor_parallel > 1:
        check_divisible(models, options.tensor_parallel, options.experts_over)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    processes = options.max_replicas or options.replicas
    with cluster(None, processes, options.tensor_parallel, options.replicas):
        _serve(options, host, port)


def _serve(options: argparse.Namespace, host: str, port: int) -> None:
    try:
        _at_signals(_leave)
        ingress = _started(options, host, port)
        ends = queue.SimpleQueue[int | None]()  # signals, and None once no request runs
        _at_signals(lambda number, _: ends.put(number))
        print(f"{options.replicas} replicas listen on {url_of(host, port)}", file=sys.stderr)
        sys.stderr.flush()
        ends.get()

        def drain(seconds: float) -> None:
            ingress.drain.remote(seconds).result()
            ends.put(None)

        # Beside this thread, which a second signal has end all requests.
        first = threading.Thread(target=drain, args=(options.shutdown_timeout,), daemon=True)
        first.start()
        if ends.get() is not None:
            drain(0.0)
        first.join(LAST_WORDS)
    finally:
        serve.shutdown()


def _at_signals(handler: Callable[[int, Any], Any]) -> None:
    """Puts a handler of SIGTERM and SIGINT where Ray has put its own, which abort with a trace."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _leave(number: int, _: Any) -> NoReturn:
    """Ends a fleet that is not there yet, with the exit code of a process without a handler."""
    raise SystemExit(128 + number)


def _started(options: argparse.Namespace, host: str, port: int) -> Any:
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        return serve.run(application(options), name=NAME)
    except RuntimeError as error:
        raise ValueError(f"the replicas did not start: {_why() or one_line(error)}") from None


def _why() -> str:
    """The last line of a failed replica's trace, which is its error; Ray's own does not say it."""
    application = serve.status().applications.get(NAME)
    deployments = application.deployments.values() if application else ()
    failed = [d.message for d in deployments if d.status == DeploymentStatus.DEPLOY_FAILED]
    lines = " ".join(failed).splitlines()
    return lines[-1].removeprefix("ValueError: ") if lines else ""
