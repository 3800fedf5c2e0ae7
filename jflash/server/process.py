"""`python -m jflash.server.process PIPE LISTENER`: HTTP for an engine at the other end of a pipe.

`jflash.server.front` starts it, with the two open files of these numbers. Exit code 0: it was told
to end; 1: the engine failed or its process has ended.
"""

import os
import socket
import sys
from multiprocessing.connection import Connection

from jflash.server.app import make_app
from jflash.server.run import log_to_stderr, serve, url_of
from jflash.server.service import service_of
from jflash.server.start import Start
from jflash.serving.collection import only_of_new_objects
from jflash.serving.pipe.remote import Remote

FAILED = 1


def main() -> None:
    pipe, listener = Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    try:
        start: Start = pipe.recv()
    except EOFError:  # the engine could not be loaded, and its process says why
        return
    log_to_stderr()
    rules = start.rules
    engine = Remote(pipe, start.sizes, start.news)
    service = service_of(start.settings, engine)
    engine.on_compiled = service.metrics.compiled.inc
    # The command's process was killed, and another one may want the port: clients see a broken
    # stream, not the end of a text.
    engine.on_lost = lambda _: os._exit(FAILED)
    app = make_app(service, api_keys=rules.keys, origins=rules.origins)
    url = url_of(*listener.getsockname()[:2])
    with only_of_new_objects():
        print(f"{service.name} listens on {url}", file=sys.stderr, flush=True)
        well = serve(
            app, service, listener,
            shutdown_timeout=rules.shutdown_timeout, hang_timeout=rules.hang_timeout,
            beside=engine,
        )  # fmt: skip
    sys.stderr.flush()
    os._exit(0 if well else FAILED)  # nothing waits for the engine's process


if __name__ == "__main__":
    main()
