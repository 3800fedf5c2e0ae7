"""A long burst without its ends: what an engine gives while requests wait for a place.

A burst's first texts find an engine that computes prompts alone, and its last ones leave places
empty; how much these weigh is a matter of its length.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from jflash.serving.engine import Engine
from jflash.serving.stats import Stats

PAUSE = 0.02  # seconds between two looks
LEAST = 4  # texts that end in between, for each slot


class Moment(NamedTuple):
    """An engine's counts at a time of `time.perf_counter`."""

    seconds: float
    stats: Stats

    @property
    def ended(self) -> int:
        return sum(self.stats.ended.values())


@contextmanager
def looked_at(engine: Engine) -> Iterator[list[Moment]]:
    """Yields the moments of the block's time, which a thread of its own adds."""
    moments = [Moment(time.perf_counter(), engine.stats())]
    over = threading.Event()

    def look() -> None:
        while not over.wait(PAUSE):
            moments.append(Moment(time.perf_counter(), engine.stats()))

    thread = threading.Thread(target=look, name="looks at the engine", daemon=True)
    thread.start()
    try:
        yield moments
    finally:
        over.set()
        thread.join()


def steady(moments: Sequence[Moment], slots: int) -> tuple[Moment, Moment] | None:
    """From when a text has ended for each slot until no request waits; None if few ended then."""
    begun = moments[0].ended + slots
    within = [each for each in moments if each.ended >= begun and each.stats.waiting]
    if not within or within[-1].ended - within[0].ended < LEAST * slots:
        return None
    return within[0], within[-1]
