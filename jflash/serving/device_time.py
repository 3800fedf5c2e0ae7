"""Seconds in which the device computed chunks of prompts, and steps.

The device computes in the order of dispatch, so the end of a program tells when the next one began.
"""

import time
from collections import defaultdict, deque
from typing import Any, NamedTuple

import jax


class UnderWay(NamedTuple):
    """A program that the device computes: its part of Counts, and an array that it fills."""

    part: str
    rows: int  # that it computes of a prompt, or verifies in a step
    dispatched: float
    array: Any  # of the device


class DeviceTime:
    """What the device has under way, and how long each program took of late."""

    def __init__(self) -> None:
        self._under_way = deque[UnderWay]()  # in order
        self._since = self._busy_until = time.perf_counter()
        self._lasted = dict[tuple[str, int], float]()  # seconds of each program, when last seen
        self.dispatching = self.waiting = 0.0  # seconds of the host, in all

    @property
    def under_way(self) -> int:
        """The number of dispatched programs that were not waited for."""
        return len(self._under_way)

    def lasted(self, part: str, rows: int) -> float:
        """The seconds of the last such program that was seen to end; 0 before the first."""
        return self._lasted.get((part, rows), 0.0)

    def begin(self) -> None:
        """Dispatching begins; the clock starts anew unless the device is at work."""
        if not self._under_way:
            self._since = time.perf_counter()

    def dispatched(self, program: UnderWay) -> None:
        """Notes that the device will compute it, and the time that the host took to say so."""
        self._under_way.append(program)
        self.dispatching += time.perf_counter() - program.dispatched

    def wait_for(self, array: Any) -> dict[str, float]:
        """Waits for the array; the seconds of what the device computed up to it, for Counts."""
        spent = defaultdict[str, float](float)
        # If it is not under way, a later one was waited for before.
        while any(each.array is array for each in self._under_way):
            one = self._under_way.popleft()
            late = one.array.is_ready()
            looked = time.perf_counter()
            jax.block_until_ready(one.array)
            now = time.perf_counter()
            self.waiting += now - looked
            begin, kind = max(one.dispatched, self._busy_until), (one.part, one.rows)
            lasted = max(now - begin, 0.0)
            if late:  # it ended unseen: it took as long as the last one that was seen to end
                lasted = min(lasted, self._lasted.get(kind, lasted))
            else:
                self._lasted[kind] = lasted
            self._busy_until = begin + lasted
            spent[one.part] += now - self._since
            spent["busy_seconds"] += lasted
            self._since = now
        return spent
