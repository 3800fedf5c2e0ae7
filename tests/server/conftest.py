"""The command itself in its process, with the embedded pair, once for all tests that leave it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

# The page runs in the Chromium that this names; without it there is nothing to run it in.
collect_ignore = [] if os.environ.get("JFLASH_CHROMIUM") else ["test_page.py"]
OPTIONS = ("--max-batch", "4", "--max-context", "512", "--max-queue", "40")
# Code as fast as that of XLA's usual level, 3, for a third less of compiling.
LEVEL = "--xla_backend_optimization_level=1"
SCRIPT = Path(__file__).parents[2] / "scripts" / "serve.py"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_server: after all other tests of the one server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file comes first, but what ends the server comes last: no other one starts."""
    items.sort(key=lambda item: item.get_closest_marker("ends_server") is not None)


class Server(NamedTuple):
    """A server that listens, and the file that it prints into."""

    process: subprocess.Popen
    url: str
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """A figure of /metrics, summed over the labels that are not given."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = re.findall(rf"^(?:vllm|jflash):{name}(?:{{.*}})? .*$", text, re.MULTILINE)
        lines = [x for x in lines if all(f'{k}="{v}"' in x for k, v in labels.items())]
        assert lines or labels, f"there is no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def started(log: Path, *options: str, **variables: str) -> Server:
    """A server of the embedded pair on a free port."""
    command = [sys.executable, str(SCRIPT), "--port", "0", "--dtype", "float32", *options]
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {LEVEL}"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stderr=out, env=os.environ | flags | variables)
    while process.poll() is None:
        if found := re.search(r"listens on (http://\S+)\n", log.read_text()):
            return Server(process, found[1], log)
        time.sleep(0.1)
    raise AssertionError(f"the server ended with {process.returncode}: {log.read_text()}")


@pytest.fixture(scope="session")
def servers(tmp_path_factory) -> Iterator[list[Server]]:
    """Those that were started; the newest may have ended."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server(compiled_soon, servers, tmp_path_factory) -> Server:
    """A server that runs: the one of the file before, unless that has ended it."""
    if not servers or servers[-1].process.poll() is not None:
        log = tmp_path_factory.mktemp("server") / "log"
        servers.append(started(log, *OPTIONS))
    return servers[-1]
