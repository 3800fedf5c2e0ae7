"""The numbers of one part of a step: measured seconds beside the part's floor. It runs nothing."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jflash.bench.floors import Rates, Work, add, draft_work, floor_seconds, verify_work
from jflash.bench.step_time import Window
from jflash.programs import Shape
from jflash.speculative import Models


@dataclass(frozen=True)
class Clock:
    """Turns seconds into a part's entry: its milliseconds beside its floor."""

    models: Models
    shape: Shape
    window: Window
    rates: Rates

    def verify_work(self, width: int, experts: float | None = None) -> Work:
        target = self.models.target.config
        return verify_work(target, self.shape.batch, width, self.window.context, experts)

    def draft_work(self, width: int) -> Work:
        assert self.models.drafter is not None
        drafter = self.models.drafter.config
        return draft_work(drafter, self.shape.batch, width, self.window.context)

    def step_work(self, width: int, experts: float | None = None) -> Work:
        return add(self.verify_work(width, experts), self.draft_work(width))

    def part(
        self, seconds: Sequence[float], work: Work, experts: float | None = None
    ) -> dict[str, Any]:
        """ms (the median), every repeat, the floor, and the experts of a layer that were read."""
        median, floor = statistics.median(seconds), floor_seconds(work, self.rates)
        return {
            "ms": 1e3 * median,
            "ms_of_repeats": [1e3 * s for s in seconds],
            "bytes": work.bytes,
            "operations": work.operations,
            "floor_ms": 1e3 * floor,
            "share_of_floor": floor / median,
            **({} if experts is None else {"experts_read": experts}),
        }
