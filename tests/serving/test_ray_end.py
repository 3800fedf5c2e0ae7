"""The end of a fleet at signals: the first waits for its requests, the second ends them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from jflash.server.relay import Asked
from tests.support.ray_marks import MARKS

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from jflash.cli.main import make_parser
from jflash.system.replicas import cluster
from jflash.serving import ray, ray_run
from tests.serving.test_ray_end import Endless

ray.Replica = Endless
options = make_parser("serve").parse_args(["--replicas", "1", "--shutdown-timeout", "600"])
with cluster(None, 1):
    ray_run._serve(options, "127.0.0.1", int(sys.argv[1]))
"""


class Endless:
    """A replica whose answers have no end."""

    def __init__(self, _: object) -> None:
        pass

    async def answer(self, asked: Asked) -> AsyncIterator[dict]:
        yield {"type": "http.response.start", "status": 200, "headers": []}
        while True:
            yield {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
            await asyncio.sleep(0.1)


def test_a_second_signal_ends_the_requests_that_the_first_waits_for():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port)],
        env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if "listen on " in line:
                break
        url = line.split()[-1]
        threading.Thread(target=server.stderr.read, daemon=True).start()
        with httpx.stream("GET", f"{url}/v1/models", timeout=60) as answer:
            pieces = answer.iter_bytes()  # kept, for with it goes the connection
            assert next(pieces).startswith(b"data: {}")
            server.send_signal(signal.SIGTERM)
            time.sleep(2)
            assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert b'"code":"shutting_down"' in b"".join(pieces)
        assert server.wait(60) == 0
    finally:
        server.kill()
