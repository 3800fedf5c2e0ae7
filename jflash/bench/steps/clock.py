"""The numbers of one part of a step: measured seconds beside the part's floor. It runs nothing.

The floor of devices that share the models is that of one device's part, without any gather.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jflash.bench.floors import Rates, Work, add, draft_work, floor_seconds, verify_work
from jflash.bench.steps.time import Window
from jflash.compiled.shape import Shape
from jflash.devices.mesh import local
from jflash.pair import Models


@dataclass(frozen=True)
class Clock:
    """Turns seconds into a part's entry: its milliseconds beside its floor."""

    models: Models
    shape: Shape
    window: Window
    rates: Rates

    def work(self, models: Models, experts: float | None = None) -> Work:
        """Of a whole step of `models`, with a drafter or without, that verifies its rows."""
        models, batch, context = local(models), self.shape.batch, self.window.context
        # What is timed with fewer rows verifies as many of each sequence.
        width = models.rows // batch if isinstance(models.rows, int) else models.block_size
        verify = verify_work(models.target.config, batch, width, context, experts)
        return verify if models.drafter is None else add(verify, self.draft_work(models.block_size))

    def draft_work(self, width: int) -> Work:
        drafter = local(self.models).drafter
        assert drafter is not None
        return draft_work(drafter.config, self.shape.batch, width, self.window.context)

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
