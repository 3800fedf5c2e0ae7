"""What tests on a local Ray need, fleets among it, and the file that keeps what they count."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jflash.system.device import describe_device

RESULT = "JFLASH_RAY"  # names a JSON file; without it the tests are left out
MARKS = [
    pytest.mark.ray,
    pytest.mark.skipif(RESULT not in os.environ, reason=f"no {RESULT}"),
    # Ray leaves sockets and files to the end of its processes.
    pytest.mark.filterwarnings("ignore"),
]


@contextlib.contextmanager
def served(options: dict[str, Any]) -> Iterator[str]:
    """The address of a fleet of these options on a Ray of its own."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    from jflash.serving.ray import NAME, app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(options), name=NAME)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def keep(name: str, **figures: Any) -> None:
    """Adds the figures of a test to the file."""
    import ray  # pyright: ignore[reportMissingImports]

    file = Path(os.environ[RESULT])
    before = json.loads(file.read_text()) if file.exists() else {}
    found = before | {name: figures} | describe_device() | {"ray": ray.__version__}
    file.write_text(json.dumps(found, indent=1) + "\n")
