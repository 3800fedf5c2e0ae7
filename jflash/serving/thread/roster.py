"""Who waits and who has a slot. A slot and pages are given and taken together.

This file knows no device and no plan.
"""

import time
from collections.abc import Callable, Iterable

from jflash.serving.grammar import GrammarError
from jflash.serving.request import Event, FinishReason
from jflash.serving.thread.holdings import Holdings
from jflash.serving.thread.job import Job

OnEvents = Callable[[Job, list[Event]], None]  # of one call, in order


class Roster:
    """The requests that have not ended. `count` adds to the loop's counts by their names."""

    def __init__(self, slots: int, holdings: Holdings, count: Callable[..., None]) -> None:
        self.waiting = list[Job]()
        self.slots: list[Job | None] = [None] * slots
        self._holdings, self._count = holdings, count

    @property
    def running(self) -> list[Job]:
        return [job for job in self.slots if job is not None]

    @property
    def all(self) -> list[Job]:
        return [*self.waiting, *self.running]

    @property
    def free(self) -> int:
        """Slots."""
        return self.slots.count(None)

    def admit(self, job: Job) -> bool:
        """Gives a slot and pages, if there are still as many pages as planned."""
        if not self._holdings.admit(job):
            return False
        self.waiting.remove(job)
        job.slot = self.slots.index(None)
        self.slots[job.slot] = job
        job.end, job.gained, job.stepped = job.to_compute, False, False
        job.unread = job.unread_certain = 0
        if job.cached is None:
            job.cached, job.queued = job.computed, time.monotonic() - job.submitted
            self._count(prompt_tokens=job.end, cached_tokens=job.cached)
        return True

    def preempt(self, job: Job) -> None:
        """Takes slot and pages from a request, which waits again."""
        self.leave(job)
        self.waiting.append(job)
        self._count(preempted=1)

    def end(self, job: Job, reason: FinishReason, version: int, on_events: OnEvents) -> None:
        """Ends a waiting or running request early; its text is of this version of the weights."""
        job.reason = reason
        if job in self.waiting:
            self.waiting.remove(job)
        self.leave(job)
        end = Event((), 0, 0, job.cached or 0, reason, version=version, queued=job.queued)
        on_events(job, [end])

    def drop_failed(self, jobs: Iterable[Job]) -> None:
        """Ends requests whose grammar cannot be followed; calls on their way are not read."""
        for job in jobs:
            if job.matcher is not None and job.matcher.error and job.reason is None:
                job.reason = "failed"
                self.leave(job)
                job.handle.fail(GrammarError(job.matcher.error))

    def leave(self, job: Job) -> None:
        """Takes slot and pages from a request, if it has any."""
        if job.slot is not None:
            self.slots[job.slot] = None
            self._holdings.leave(job)
            job.slot = job.drafted = None
