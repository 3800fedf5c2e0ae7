"""An event loop sends to an end that does not read, and goes on."""

import asyncio
import threading
import time
from dataclasses import fields
from multiprocessing import Pipe
from typing import Any

import pytest

from jflash.serving.pipe.outbox import AT_ONCE, Outbox
from jflash.serving.pipe.remote import News, Remote, Sizes
from jflash.serving.request import Failed, Request
from jflash.serving.stats import Stats


def test_messages_wait_in_order_for_an_end_that_does_not_read():
    near, far = Pipe()
    outbox, large = Outbox(near), "x" * 2**22
    messages = ["first", large, "small", *range(2000), large, "last"]
    begin = time.monotonic()
    for message in messages:
        outbox.send(message)
    assert time.monotonic() - begin < 2  # to wait would be for good
    assert [far.recv() for _ in messages] == messages


def test_an_end_that_is_gone_takes_nothing():
    near, far = Pipe()
    outbox = Outbox(near)
    far.close()
    for message in ("small", "x" * 4 * AT_ONCE, "small"):
        outbox.send(message)
    near.close()
    outbox.send("small")


def test_a_long_prompt_to_an_engine_that_has_stopped_holds_nobody_up():
    """So the watch sees that nothing comes back, and gives the engine up."""
    near, far = Pipe()
    none: Any = dict.fromkeys((field.name for field in fields(Stats)), 0)
    idle = Stats(**none)
    remote = Remote(near, Sizes(2**20, 100), News([], [], idle, 0))
    long = Request(prompt_ids=[1] * 500_000, max_tokens=1)

    async def main() -> None:
        async with remote:
            asked = asyncio.create_task(remote.submit(long))
            await asyncio.sleep(0.2)
            assert remote.unanswered() == 0 and not asked.done()
            remote.give_up(Failed("the device has not answered"))
            with pytest.raises(Failed, match="has not answered"):
                await asked

    asyncio.run(asyncio.wait_for(main(), 30))
    far.close()


def test_a_pipe_may_be_closed_while_a_message_is_half_sent(monkeypatch):
    """The thread that sends it meets a connection without a number, and ends nobody's work."""
    failed = list[Any]()
    monkeypatch.setattr(threading, "excepthook", lambda given: failed.append(given.exc_value))
    for _ in range(5):
        near, far = Pipe()
        outbox = Outbox(near)
        outbox.send(b"x" * 2**24)
        time.sleep(0.01)
        near.close()
        far.close()
        outbox.send("small")
        time.sleep(0.01)
    assert not failed
