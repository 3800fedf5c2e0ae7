"""Texts that have a grammar, between two of their steps: their drafts, and the masks for these.

The drafts wait on the device, and the host has a copy. This file knows requests, and no pages.
"""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from jaxtyping import Bool, Int

from jflash.pair import Models, Params
from jflash.serving.calls.constrained import Constrained, Who, compile_constrained
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.packing import mask_words
from jflash.serving.grammar import fill
from jflash.serving.thread.job import Given, Job
from jflash.tokens.drafts import Proposal


class Forms:
    """The program of one layout, and the drafts of the newest step that made some."""

    def __init__(self, models: Models, layout: Layout) -> None:
        self.programs: Constrained | None = None
        self.drafted: Proposal | None = None  # on the device; donated
        self._models, self._layout = models, layout
        self._newest: Future[Given] | None = None
        self._drafted_at = dict[int, int]()  # the place of each slot among its drafts

    def prepare(self, params: Params) -> None:
        """Compiles what the steps need, once."""
        if self.programs is None:
            self.programs = compile_constrained(self._models, params, self._layout)

    def sleep(self) -> None:
        """Frees the drafts."""
        self.drafted = self._newest = None

    def who(
        self, jobs: Sequence[Job], slots: Int[np.ndarray, " n"]
    ) -> tuple[list[Job], Bool[np.ndarray, "3 n"]]:
        """Who of these steps, and what the next step does for each of its slots: one with a grammar
        steps if the newest step drafted for it."""
        drafting = [job for job in jobs if job.matcher is not None]
        drafted = [job for job in drafting if job.drafted and job.drafted is self._newest]
        ready = [*drafted, *(job for job in jobs if job.matcher is None)]
        who = Who(steps=ready, drafted=drafted, drafts=drafting)
        return ready, np.stack([_at(slots, some) for some in who])

    def masks(self, jobs: Sequence[Job], slots: Int[np.ndarray, " n"]) -> Int[np.ndarray, "n W _"]:
        """The masks along the drafts of those that step in the call of these slots; for others,
        ones."""
        width, at = self._models.block_size, slots.tolist()
        masks = np.full((len(slots), width, mask_words(self._models)), -1, np.int32)
        blocks = []
        for job in jobs:
            if job.matcher is not None:
                assert self._newest is not None and job.slot is not None, "it is drafted for"
                drafts = np.asarray(self._newest.result().drafts)[self._drafted_at[job.slot]]
                blocks.append((at.index(job.slot), job.matcher, drafts.tolist()))
        fill(masks, blocks)
        return masks

    def follows(
        self, jobs: Sequence[Job], slots: Int[np.ndarray, " n"], given: Future[Given]
    ) -> None:
        """Notes the step of these slots that drafts for those of these with a grammar."""
        self._newest = given
        self._drafted_at = {slot: i for i, slot in enumerate(slots.tolist())}
        for job in jobs:
            if job.matcher is not None:
                job.drafted = given


def _at(slots: Int[np.ndarray, " n"], jobs: Sequence[Job]) -> Bool[np.ndarray, " n"]:
    """Which of these slots are the jobs'."""
    return np.isin(slots, [job.slot for job in jobs if job.slot is not None])
