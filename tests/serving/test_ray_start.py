"""`jflash serve --replicas` that is told to end before its replicas are there."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jflash.cli.main import run
from tests.support.ray_marks import MARKS

pytestmark = MARKS
ROOT = Path(__file__).parents[2]


def controllers() -> set[int]:
    """Ray Serve's processes that start replicas, by what Ray calls them."""
    found = set()
    for process in Path("/proc").iterdir():
        title = process / "cmdline"
        if process.name.isdecimal() and title.exists() and b"ServeController" in title.read_bytes():
            found.add(int(process.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_fleet_that_starts_ends_at_a_signal_without_a_trace(number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = controllers()
    command = [sys.executable, "-m", "jflash.cli.main", "serve", "--replicas", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    server = subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 240
    while not controllers() - others and time.monotonic() < end:
        assert server.poll() is None
        time.sleep(0.1)
    server.send_signal(number)
    _, errors = server.communicate(timeout=120)
    assert server.returncode == 128 + number and "received at time" not in errors
    assert "listen on" not in errors and not controllers() - others


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tensor-parallel", "3"], "3 devices cannot share the target's attention heads"),
        (["--reasoning", "on"], "--reasoning on: the chat template has no enable_thinking"),
        (["--max-context", "99999"], "--max-context 99999 passes the model's 2048 positions"),
        (["--api-key-file", "nothere"], "--api-key-file nothere: No such file or directory"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(options, said, capsys):
    assert run("serve", ["--replicas", "2", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_gpus_that_are_not_there_are_not_waited_for(monkeypatch, capsys):
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 4, "GPU": 3}')
    assert run("serve", ["--replicas", "2", "--tensor-parallel", "2", "--port", "0"]) == 2
    assert "need 4 GPUs at once, and this machine has 3: ask for fewer" in capsys.readouterr().err


def test_what_only_a_replica_finds_out_is_the_last_line(capfd):
    options = ["--dtype", "float32", "--max-batch", "2", "--max-context", "256", "--pages", "1"]
    assert run("serve", ["--replicas", "1", "--port", "0", *options]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert "the replicas did not start: a request of 256 tokens needs 4 pages: " in last
