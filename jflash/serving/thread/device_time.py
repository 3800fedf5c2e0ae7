"""Seconds in which the device computed chunks of prompts, and steps.

The device computes in the order of dispatch, so the end of a program tells when the next one began,
if that was dispatched by then. A program that waits for nothing begins at some time while it is
dispatched: as long as the host still launches its kernels, nobody knows how long the device had
none. So there are two sums: of the seconds in which it may have computed, and of those in which it
did for certain.
"""

import time
from collections import defaultdict, deque
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from jflash.budget.rounds import Round

PROMPTS = "prefill_seconds"


class Dispatched(NamedTuple):
    """An array that a program fills, and when the host began and ended to dispatch the program."""

    array: Any  # of the device
    began: float
    ended: float


class UnderWay(NamedTuple):
    """A program that the device will compute: its part of Counts, and what it will give."""

    part: str
    rows: Hashable  # that it computes of a prompt, or its program of steps
    given: Future[Any]
    steps: int = 1


class DeviceTime:
    """What the device has under way, and how long each program took of late."""

    def __init__(self) -> None:
        self._under_way = deque[UnderWay]()  # in order
        self._since = self._busy_until = self._seen_until = time.perf_counter()
        self._unseen = 0.0  # busy seconds since the last end that was seen
        self._lasted = dict[
            tuple[str, Hashable, int], float
        ]()  # seconds of each program, when last seen
        self.dispatching = self.waiting = 0.0  # seconds of the host, in all
        self._blocked = 0.0  # of those that it waited, once all was dispatched that it waited for
        self._spent = 0.0  # seconds with work
        self._on_prompts = self._on_steps = 0.0  # seconds of the device, for certain
        self._rounds = np.zeros(5)  # the sums of all rounds before

    @property
    def under_way(self) -> int:
        """The number of programs that were not waited for."""
        return len(self._under_way)

    def lasted(self, part: str, rows: Hashable) -> float:
        """The seconds of such a program of one step, as they were last seen; 0 before the first."""
        return self._lasted.get((part, rows, 1), 0.0)

    def begin(self) -> None:
        """Dispatching begins; the clock starts anew unless the device is at work."""
        if not self._under_way:
            self._since = time.perf_counter()

    def follows(self, program: UnderWay) -> None:
        """Notes that the device will compute it after all others."""
        self._under_way.append(program)

    def round(self) -> Round:
        """What was seen since the last call of this."""
        host = self._blocked, self.dispatching
        sums = np.array([self._spent, *host, self._on_prompts, self._on_steps])
        spent, blocked, dispatching, prompts, steps = (1000 * (sums - self._rounds)).tolist()
        self._rounds = sums
        return Round(spent, max(spent - blocked, dispatching), prompts, steps)

    def wait_for(self, given: Future[Any]) -> dict[str, float]:
        """Waits for the program that gives this; the seconds of what the device computed up to its
        end, for Counts."""
        spent = defaultdict[str, float](float)
        # If it is not under way, a later one was waited for before.
        while any(each.given is given for each in self._under_way):
            one = self._under_way.popleft()
            looked = time.perf_counter()
            dispatched = one.given.result().dispatched
            late, ready = dispatched.array.is_ready(), time.perf_counter()
            jax.block_until_ready(dispatched.array)
            now = time.perf_counter()
            self._blocked += now - ready
            self.waiting += now - looked
            lasted, certain = self._computed((one.part, one.rows, one.steps), dispatched, now, late)
            spent[one.part] += now - self._since
            self._spent += now - self._since
            if one.part == PROMPTS:
                self._on_prompts += certain
            else:
                self._on_steps += certain
            spent["busy_seconds"] += lasted
            spent["seen_seconds"] += certain
            self._since = now
        return spent

    def _computed(
        self, kind: tuple[str, Hashable, int], dispatched: Dispatched, now: float, late: bool
    ) -> tuple[float, float]:
        """The seconds for which the device computed a program, at most and for certain.

        `late`: it ended before the host looked, so it took as long as it was last seen to, at most.
        The certain seconds include those of late ones before it: all of them are dispatched.
        """
        before, (_, began, ended) = self._busy_until, dispatched
        most = max(now - max(began, before), 0.0)
        known = self._lasted.get(kind, most)
        if late:
            most = min(most, known)
            self._busy_until = max(began, before) + most
            self._unseen += most
            return most, 0.0
        certain = max(now - max(ended, self._seen_until), 0.0)
        if ended > before:  # it may have waited for the host between its kernels
            most = min(most, known)
        most = max(most, certain - self._unseen)
        self._busy_until = self._seen_until = now
        self._unseen = 0.0
        self._lasted[kind] = most
        return most, certain
