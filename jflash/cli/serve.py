"""serve: a pair with OpenAI's routes, until SIGTERM."""

import argparse
import os
import sys

from jflash.cli.command import require
from jflash.cli.served import FAILED, api_keys, counted_compilations, loaded


def run(options: argparse.Namespace) -> None:
    require("starlette", "uvicorn", "prometheus_client", "msgspec", "llguidance")
    if options.replicas is not None:
        require("ray")
        # Before Ray is imported: it would print one line for all requests whose lines differ in
        # numbers alone.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        from jflash.serving.ray_run import serve_replicas

        serve_replicas(options)
        return
    from jflash.server.front import Front
    from jflash.server.run import listen, log_to_stderr
    from jflash.server.start import Rules

    rules = Rules(
        api_keys(options), options.allow_origin, options.shutdown_timeout, options.hang_timeout
    )
    log_to_stderr()
    with Front(listen(options.host, options.port), rules) as front:
        engine, grammars, settings = loaded(options)
        well = front.serve(engine, grammars, settings, counted_compilations())
    if not well:  # the engine's thread may hang in the device: nothing waits for it
        sys.stderr.flush()
        os._exit(FAILED)
    engine.close()
