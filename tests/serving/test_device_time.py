"""The device's time: an end that the host was late for is no busy time."""

from typing import Any

import pytest

from jflash.serving import device_time
from jflash.serving.device_time import DeviceTime, UnderWay


class Filled:
    """An array that the device has filled at some second."""

    def __init__(self, clock: list[float], at: float) -> None:
        self.clock, self.at = clock, at

    def is_ready(self) -> bool:
        return self.clock[0] >= self.at

    def block_until_ready(self) -> None:
        self.clock[0] = max(self.clock[0], self.at)


@pytest.fixture
def clock(monkeypatch):
    """The second, which only programs and tests move."""
    clock = [10.0]
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: clock[0])
    return clock


def under_way(time: DeviceTime, part: str, clock: list[float], end: float) -> Any:
    array: Any = Filled(clock, end)
    time.dispatched(UnderWay(part, 8, clock[0], array))
    return array


def test_an_end_that_nobody_saw_counts_as_the_last_one_seen(clock):
    time, found = DeviceTime(), []
    for part, takes, host in (("decode", 4.0, 1.0), ("decode", 4.0, 7.0), ("prefill", 2.0, 0.0)):
        time.begin()
        array = under_way(time, part, clock, clock[0] + takes)
        clock[0] += host
        found.append(time.wait_for(array))
        clock[0] += 100.0  # nothing to do
    assert found[0] == {"decode": 4.0, "busy_seconds": 4.0}
    assert found[1] == {"decode": 7.0, "busy_seconds": 4.0}  # it ended 3 s before the host looked
    assert found[2] == {"prefill": 2.0, "busy_seconds": 2.0}
    assert not time.under_way


def test_a_device_that_always_has_the_next_program_is_busy_all_the_time(clock):
    time, begin = DeviceTime(), clock[0]
    arrays = [under_way(time, "decode", clock, begin + 3.0)]
    busy = 0.0
    for i in range(2, 5):
        arrays.append(under_way(time, "decode", clock, begin + 3.0 * i))
        busy += time.wait_for(arrays[-2])["busy_seconds"]
        clock[0] += 1.0  # the host's work on what it read
    busy += time.wait_for(arrays[-1])["busy_seconds"]
    assert busy == pytest.approx(12.0)
