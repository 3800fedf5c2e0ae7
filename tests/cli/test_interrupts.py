"""A Ctrl-C ends a command wherever Python is."""

import argparse
import gc
import signal
import threading
import time

import pytest

from jflash.cli.command import INTERRUPTED, Parser, run_command


@pytest.fixture(autouse=True)
def usual_handler():
    """A process that a shell has put in the background ignores Ctrl-C, and so may the tests'."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("early", [0, 2])
def test_an_interrupt_in_a_callback_of_the_garbage_collector_ends_a_command(
    early, capsys, monkeypatch
):
    """Also where the one that comes again is `early`: while its thread is started, and dropped."""
    begun = []

    class Timer(threading.Timer):
        def start(self) -> None:
            begun.append(self)
            super().start()
            if len(begun) <= early:
                time.sleep(1)

    def once(*_: object) -> None:
        gc.callbacks.remove(once)
        signal.raise_signal(signal.SIGINT)

    def body(_: argparse.Namespace) -> None:
        gc.callbacks.append(once)
        gc.collect()
        time.sleep(3)

    monkeypatch.setattr(threading, "Timer", Timer)
    assert run_command(Parser("a command", "It waits."), body, []) == INTERRUPTED
    assert not capsys.readouterr().err
