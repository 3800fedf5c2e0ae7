"""The device's time: an end that the host was late for is no busy time, nor is a slow dispatch."""

from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from jflash.serving.thread import device_time
from jflash.serving.thread.device_time import DeviceTime, Dispatched, UnderWay


class Filled:
    """An array that the device has filled at some second."""

    def __init__(self, clock: list[float], at: float) -> None:
        self.clock, self.at = clock, at

    def is_ready(self) -> bool:
        return self.clock[0] >= self.at

    def block_until_ready(self) -> None:
        self.clock[0] = max(self.clock[0], self.at)


class Given(NamedTuple):
    dispatched: Dispatched


@pytest.fixture
def clock(monkeypatch):
    """The second, which only programs and tests move."""
    clock = [10.0]
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: clock[0])
    return clock


def under_way(
    time: DeviceTime, part: str, clock: list[float], end: float, dispatch: float = 0.0
) -> Future[Any]:
    given = Future[Any]()
    began, ended = clock[0], clock[0] + dispatch
    clock[0] = ended
    given.set_result(Given(Dispatched(Filled(clock, end), began, ended)))
    time.follows(UnderWay(part, 8, given))
    return given


def test_an_end_that_nobody_saw_counts_as_the_last_one_seen(clock):
    time, found = DeviceTime(), []
    for part, takes, host in (("decode", 4.0, 1.0), ("decode", 4.0, 7.0), ("prefill", 2.0, 0.0)):
        time.begin()
        given = under_way(time, part, clock, clock[0] + takes)
        clock[0] += host
        found.append(time.wait_for(given))
        clock[0] += 100.0  # nothing to do
    assert found[0] == {"decode": 4.0, "busy_seconds": 4.0, "seen_seconds": 4.0}
    # It ended 3 s before the host looked.
    assert found[1] == {"decode": 7.0, "busy_seconds": 4.0, "seen_seconds": 0.0}
    assert found[2] == {"prefill": 2.0, "busy_seconds": 2.0, "seen_seconds": 2.0}
    assert not time.under_way


def test_a_device_that_always_has_the_next_program_is_busy_all_the_time(clock):
    time, begin = DeviceTime(), clock[0]
    given = [under_way(time, "decode", clock, begin + 3.0)]
    spent = []
    for i in range(2, 5):
        given.append(under_way(time, "decode", clock, begin + 3.0 * i, dispatch=0.5))
        spent.append(time.wait_for(given[-2]))
        clock[0] += 1.0  # the host's work on what it read
    spent.append(time.wait_for(given[-1]))
    for name in ("busy_seconds", "seen_seconds"):
        assert sum(each[name] for each in spent) == pytest.approx(12.0)


def test_what_is_dispatched_before_it_is_computed_is_certain_to_the_last(clock):
    """The host looks after two of three have ended; a fourth is dispatched when it is idle."""
    time, begin = DeviceTime(), clock[0]
    three = [
        under_way(time, part, clock, begin + end, dispatch=1.0)
        for part, end in (("prefill", 4.0), ("prefill", 7.0), ("decode", 12.0))
    ]
    clock[0] = begin + 8.0
    spent = time.wait_for(three[-1])
    assert spent["busy_seconds"] == 12.0 and spent["seen_seconds"] == 9.0
    clock[0] += 3.0
    after = time.wait_for(under_way(time, "decode", clock, clock[0] + 4.0, dispatch=1.0))
    assert after == {"decode": 7.0, "busy_seconds": 4.0, "seen_seconds": 3.0}
    assert time.wait_for(three[0]) == {}


def test_a_device_that_waits_for_the_dispatch_is_not_known_to_be_busy(clock):
    """The host launches its kernels for 5 s, and 1 s later the device has computed them; it takes 2
    if they are there, which it has shown once."""
    time, begin = DeviceTime(), clock[0]
    first = under_way(time, "decode", clock, begin + 9.0)
    queued = under_way(time, "decode", clock, begin + 11.0, dispatch=1.0)
    assert time.wait_for(first)["seen_seconds"] == 9.0
    assert time.wait_for(queued)["busy_seconds"] == 2.0
    slow = under_way(time, "decode", clock, clock[0] + 6.0, dispatch=5.0)
    assert time.wait_for(slow) == {"decode": 6.0, "busy_seconds": 2.0, "seen_seconds": 1.0}
    other = under_way(time, "prefill", clock, clock[0] + 6.0, dispatch=5.0)
    assert time.wait_for(other) == {"prefill": 6.0, "busy_seconds": 6.0, "seen_seconds": 1.0}
    assert time.lasted("decode", 8) == 2.0


def test_a_round_says_what_it_took_and_what_the_host_took(clock):
    """A prompt of 2 s, then a call that computes for 3 s of which 1 is dispatched."""
    time, begin = DeviceTime(), clock[0]
    time.begin()
    prompt = under_way(time, device_time.PROMPTS, clock, begin + 2.0)
    call = under_way(time, "decode_seconds", clock, begin + 5.0, dispatch=1.0)
    time.dispatching += 1.0
    for given in (prompt, call):
        time.wait_for(given)
        clock[0] += 0.5  # the host's work
    assert time.round() == (5000.0, 1500.0, 2000.0, 3000.0)
    clock[0] += 100.0  # nothing to do
    time.begin()
    time.dispatching += 7.0
    time.wait_for(under_way(time, "decode_seconds", clock, clock[0] + 4.0))
    assert time.round() == pytest.approx((4000.0, 7000.0, 0.0, 4000.0))
