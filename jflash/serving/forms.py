"""Texts that have a grammar, between two of their steps: their drafts, and the masks for these.

The drafts wait on the device, and the host has a copy. This file knows requests, and no pages.
"""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from jaxtyping import Bool, Int

from jflash.drafts import Proposal
from jflash.pair import Models, Params
from jflash.serving.constrained import Constrained, Who, compile_constrained
from jflash.serving.grammar import fill
from jflash.serving.job import Given, Job
from jflash.serving.packing import mask_words
from jflash.serving.slots import Layout


class Forms:
    """The program of one layout, and the drafts of the newest step that made some."""

    def __init__(self, models: Models, layout: Layout) -> None:
        self.programs: Constrained | None = None
        self.drafted: Proposal | None = None  # on the device; donated
        self._models, self._layout = models, layout
        self._newest: Future[Given] | None = None

    def prepare(self, params: Params) -> None:
        """Compiles what the steps need, once."""
        if self.programs is None:
            self.programs = compile_constrained(self._models, params, self._layout)

    def sleep(self) -> None:
        """Frees the drafts."""
        self.drafted = self._newest = None

    def who(self, jobs: Sequence[Job]) -> tuple[list[Job], Bool[np.ndarray, "3 B"]]:
        """Who of these steps, and what the next step does for each slot: one with a grammar steps
        if the newest step drafted for it."""
        drafting = [job for job in jobs if job.matcher is not None]
        drafted = [job for job in drafting if job.drafted and job.drafted is self._newest]
        ready = [*drafted, *(job for job in jobs if job.matcher is None)]
        who = Who(steps=ready, drafted=drafted, drafts=drafting)
        return ready, np.stack([self._slots(some) for some in who])

    def masks(self, jobs: Sequence[Job]) -> Int[np.ndarray, "B W _"]:
        """The masks along the drafts of those that step; for others, ones."""
        batch, width = self._layout.shape.batch, self._models.block_size
        masks = np.full((batch, width, mask_words(self._models)), -1, np.int32)
        blocks = []
        for job in jobs:
            if job.matcher is not None:
                assert self._newest is not None and job.slot is not None, "it is drafted for"
                drafts = np.asarray(self._newest.result().drafts)[job.slot]
                blocks.append((job.slot, job.matcher, drafts.tolist()))
        fill(masks, blocks)
        return masks

    def follows(self, jobs: Sequence[Job], given: Future[Given]) -> None:
        """Notes the step that drafts for those of these with a grammar."""
        self._newest = given
        for job in jobs:
            if job.matcher is not None:
                job.drafted = given

    def _slots(self, jobs: Sequence[Job]) -> np.ndarray:
        slots = np.zeros(self._layout.shape.batch, bool)
        for job in jobs:
            slots[job.slot] = True
        return slots
