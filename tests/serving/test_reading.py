"""Who waits for events is told of them once the device has its next work, and of all of them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from jflash.compiled.shape import Shape
from jflash.serving.calls.layout import Layout
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Failed, Request
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from jflash.serving.thread.reading import Unread
from tests.support.pairs import prompts, random_pair

PLACES, STEPS, CHUNK, CONTEXT = 2, 2, 32, 192


@pytest.fixture(scope="module")
def pair():
    return random_pair()


def loop_of(pair) -> Loop:
    layout = Layout(Shape.of(PLACES, CONTEXT, 16, CHUNK), 9, STEPS, ("greedy",))
    return Loop(pair.models, pair.params, layout, b"")


def job_of(new: int, order: int = 0) -> Job:
    [ids] = prompts(1, seed=order, low=20, high=21)
    handle = Handle(Request(prompt_ids=ids, max_tokens=new), lambda _: None)
    return Job(handle=handle, order=(0, order), seed=0, deadline=None, tokens=list(ids))


def noted(owner: Any, name: str, note: Callable[[], None]) -> None:
    """Has `note` called before the method."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *given: (note(), method(*given))[1])


def test_events_come_once_the_device_has_its_next_call(pair):
    loop, log = loop_of(pair), list[str]()
    noted(loop.device, "call", lambda: log.append("call"))
    noted(loop.device, "learn", lambda: log.append("read"))
    loop.waiting.append(job_of(60))
    while not loop.idle:
        loop.round(lambda _, some: log.append(f"told {some[-1].finish_reason or ''}"))
    loop.close()
    assert log[:2] == ["call", "told "], "a first token waits for no other call"
    last = len(log) - log[::-1].index("call")
    after = [log[i + 1] for i, what in enumerate(log[:last]) if what == "read"]
    assert len(after) > 3 and set(after) == {"call"}
    assert log[-2:] == ["read", "told length"]


@pytest.mark.parametrize("ready", [True, False])
def test_an_end_waits_for_nothing_and_others_for_what_the_device_needs(pair, monkeypatch, ready):
    """A text goes on beside one that ends, for which a third one comes. If that one's first token
    is there already, what the first gained beside the end waits for the next call."""
    monkeypatch.setattr(Unread, "ready", property(lambda _: ready))
    loop, log = loop_of(pair), list[str]()
    noted(loop.device, "call", lambda: log.append("call"))
    noted(loop.device, "learn", lambda: log.append("read"))
    noted(loop.prompts.passes, "whole", lambda: log.append("prompts"))
    loop.waiting += [job_of(60), job_of(12, 1), job_of(30, 2)]
    names = "first", "second", "third"

    def on_events(job: Job, some: list[Event]) -> None:
        log.append(f"{names[job.order[1]]} {some[-1].finish_reason or 'goes on'}")

    while not loop.idle:
        loop.round(on_events)
    loop.close()
    end, begin = log.index("second length"), log.index("third goes on")
    assert log[end - 1] == "read" and end < begin
    assert log[end + 1 : end + 4] == ["prompts", "call", "first goes on"]
    # The next call was read before the third text's token.
    between = log[begin - 2 : begin + 2]
    if ready:
        assert between[:2] == ["first goes on", "read"] and between[3:] == ["call"]
    else:
        assert between == ["read", "first goes on", "third goes on", "call"]


def until_untold(loop: Loop, job: Job, events: list[Event]) -> None:
    """Rounds until tokens of this text were read of which nobody was told."""
    for _ in range(50):
        if any(gained.job is job for gained in loop._unread._untold):
            return
        loop.round(lambda _, some: events.extend(some))
    raise AssertionError("all were told at once")


@pytest.mark.parametrize("end", ["cancelled", "timeout"])
def test_an_early_end_comes_after_what_was_read(pair, end):
    loop, job, events = loop_of(pair), job_of(90), list[Event]()
    loop.waiting.append(job)
    until_untold(loop, job, events)
    told, read = [t for e in events for t in e.token_ids], job.tokens[job.prompt_tokens :]
    assert told == read[: len(told)] and len(told) < len(read)
    if end == "cancelled":
        job.cancelled = True
    else:
        job.deadline = 1e-9
    while not loop.idle:
        loop.round(lambda _, some: events.extend(some))
    loop.close()
    assert [t for e in events for t in e.token_ids] == read
    assert [e.finish_reason for e in events if e.finish_reason] == [end]
    assert events[-1].finish_reason == end


def test_a_failure_comes_after_what_was_read(pair, monkeypatch):
    """One that was told of its end before keeps it."""
    with Engine(pair, max_batch=PLACES, max_context=CONTEXT, kinds=("greedy",)) as engine:
        loop, plan, ended = engine._loop, engine._loop._plan, threading.Event()

        def failing():
            untold = loop._unread._untold
            assert not any(gained.job.reason for gained in untold), "an end does not wait"
            if ended.is_set() and untold:
                raise OSError("the device is gone")
            return plan()

        monkeypatch.setattr(loop, "_plan", failing)
        long, short = (engine.submit(job_of(n, i).request) for i, n in enumerate((120, 12)))
        short.at_end(ended.set)
        assert ended.wait(60) and len(short.result().token_ids) == 12
        given = list[int]()
        with pytest.raises(Failed) as failed:
            for event in long:
                given += event.token_ids
    assert str(failed.value.__cause__) == "the device is gone"
    assert 12 < len(given) < 120
