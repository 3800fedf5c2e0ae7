"""One device, driven by one thread: a round is planned, dispatched, and read one round later.

Nothing here changes a request's text: a preempted one computes its keys and values again and
continues from its newest token. This file knows only token ids.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from jflash.pair import Models, Params
from jflash.serving.calls.layout import Layout, settled
from jflash.serving.calls.some_slots import given_slots
from jflash.serving.schedule import Plan
from jflash.serving.stats import SIZES
from jflash.serving.thread.device import Device
from jflash.serving.thread.holdings import Holdings
from jflash.serving.thread.job import Counts, Job, Read, Tally
from jflash.serving.thread.planning import planned
from jflash.serving.thread.prompt_passes import PromptPasses
from jflash.serving.thread.prompts import Prompts
from jflash.serving.thread.reading import Unread
from jflash.serving.thread.roster import OnEvents, Roster


class Loop:
    """The device's state, the pages and the slots; used by one thread.

    `burst` and `stall` are those of `Prompts`.
    """

    def __init__(
        self,
        models: Models,
        params: Params,
        layout: Layout,
        salt: bytes,
        burst: int = 4,
        stall: float = math.inf,
    ) -> None:
        layout = settled(models, layout)
        self.device = Device(models, params, layout)
        self.holdings = Holdings(models, layout, salt)
        self.held = self.asleep = False  # held: no new text begins
        self.version = 0  # of the parameters
        self.before_waiting: Callable[[], None] = lambda: None  # events were told
        self._tally = Tally()
        self._count = self._tally.add
        self.roster = Roster(layout.slots, self.holdings, self._count)
        self.waiting = self.roster.waiting
        self.rounds_by_tokens = [0] * (len(SIZES) + 1)
        passes = PromptPasses(self.device)
        self.prompts = Prompts(passes, self.holdings, self._count, burst, stall)
        self._unread = Unread(self.device, self.holdings, self.roster, self._count)

    @property
    def counts(self) -> Counts:
        return self._tally.counts

    @property
    def running(self) -> list[Job]:
        return self.roster.running

    @property
    def without_place(self) -> int:
        """Requests that step in no call yet: those whose prompts are computed ahead too."""
        return len(self.waiting) + max(0, len(self.running) - self.device.layout.shape.batch)

    @property
    def free_places(self) -> int:
        """Places in a call of steps that no request has; none as long as no new text begins."""
        free = self.device.layout.shape.batch - len(self.running)
        return 0 if self.held or self.asleep else max(0, free)

    @property
    def quiet(self) -> bool:
        """Whether no text is under way; requests that have no token yet may wait."""
        return not (self.running or self._unread or any(job.begun for job in self.waiting))

    def new_weights(self, params: Params) -> None:
        """Takes other parameters of the same shapes; the loop must be quiet."""
        assert self.quiet, "a text is of one version"
        same_target = params.target is self.device.params.target
        self.device.new_weights(params)
        self.version += 1
        for job in self.waiting:
            job.names = []
        if same_target:
            self.holdings.new_drafter(self.version)
        else:
            self.holdings.forget_all()

    def sleep(self) -> None:
        """Frees the state's memory; the loop must be quiet."""
        assert self.quiet, "pages in use"
        self.holdings.forget_all()
        self.device.sleep()
        self.asleep = True

    def wake(self) -> None:
        """Allocates an empty state after `sleep`."""
        if self.asleep:
            self.device.wake()
        self.asleep = False

    def close(self) -> None:
        """Ends the device's thread."""
        self.device.close()

    @property
    def idle(self) -> bool:
        able = [job for job in self.waiting if job.cancelled or not self.asleep]
        return not (able or self.running or self._unread or self.patience == 0)

    @property
    def patience(self) -> float | None:
        """Seconds until the first waiting request times out, which it does asleep too."""
        deadlines = [job.deadline for job in self.waiting if job.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def round(self, on_events: OnEvents) -> None:
        """Plans and dispatches a round, then reads what the device computes before its steps."""
        began, times, before = time.perf_counter(), self.device.time, self.counts.tokens
        waited, dispatched = times.waiting, times.dispatching
        self._round(on_events)
        if tokens := self.counts.tokens - before:
            self.rounds_by_tokens[bisect_left(SIZES, tokens)] += 1
        self._count(
            rounds=1,
            host_seconds=time.perf_counter() - began - (times.waiting - waited),
            dispatch_seconds=times.dispatching - dispatched,
        )

    def _round(self, on_events: OnEvents) -> None:
        """One round.

        The device always has the next call by the time that the host waits for anything: for a
        first token too, which an array of its own brings as soon as its chunk has run.
        """
        if cancelled := [job for job in self.roster.all if job.cancelled]:
            self.tell(on_events)
        for job in cancelled:
            self.roster.end(job, "cancelled", self.version, on_events)
        of_grammar = any(job.matcher for job in self.roster.all)
        self.holdings.steps = self.device.layout.steps + of_grammar
        what = self._plan()
        if what.preempted and self._unread:
            self.drain(on_events)  # tokens that are on their way are not computed twice
            what = self._plan()
        if what.expired:
            self.tell(on_events)
        by_order = {job.order: job for job in self.roster.all}
        jobs = lambda orders: [by_order[order] for order in orders]  # noqa: E731
        for job in jobs(what.expired):
            self.roster.end(job, "timeout", self.version, on_events)
        for job in jobs(what.preempted):
            self.preempt(job)
        for job in jobs(what.grown):
            self.holdings.grow(job)
        for job in jobs(what.admitted):
            if self.roster.admit(job):
                self.prompts.passes.admit(job)
        self.device.time.begin()
        chunked = jobs(what.chunks)
        reads = self.prompts.dispatch(chunked)
        self.roster.drop_failed(chunked)
        self._unread += reads
        left = len(reads) - max((i for i, read in enumerate(reads, 1) if read.last), default=0)
        ready = {id(job): job for job in chunked if not job.end}.values()
        stepping = [job for job in (*jobs(what.steps), *ready) if job.slot is not None]
        stepping = [job for job in stepping if job.certain < job.limit]
        stepping.sort(key=lambda job: (not job.stepped, job.order))  # who has begun goes on
        if any(job.matcher for job in stepping):
            self._unread.append(self._step_with_forms(stepping))
            left = 0  # the next masks need its drafts, and whole texts
            stepping = [job for job in stepping if not job.matcher and job.certain < job.limit]
        if stepping:
            count = self.device.slots_for(stepping)
            given = given_slots(self.device.layout, count)
            self._unread.append(self._call(self.device.call, stepping, count, given))
            left += 1
        self.tell(on_events)
        self.before_waiting()
        while len(self._unread) > left:
            read = self._unread.read_next()
            if len(self._unread) > left and self._unread[0].given is not read.given:
                # Ends do not wait for the next prompt's token, nor do others if it is not there.
                self._unread.tell_ends(self.version, on_events)
                if not self._unread.ready:
                    self.tell(on_events)
                self.before_waiting()
        self._unread.tell_ends(self.version, on_events)
        if of_grammar or not self._unread:
            self.tell(on_events)  # others may wait until the device has its next work
        self.before_waiting()

    def tell(self, on_events: OnEvents) -> None:
        """Hands on the events of what was read."""
        self._unread.tell(self.version, on_events)

    def preempt(self, job: Job) -> None:
        """Takes slot and pages from a request, which waits again; all calls must be read."""
        assert not self._unread, "tokens on their way would be lost"
        self.roster.preempt(job)

    def drop(self) -> Iterable[Job]:
        """All requests that have not ended, after a failure."""
        return self.roster.all

    def _plan(self) -> Plan:
        free, at_once = self.roster.free, self.device.layout.shape.batch
        places, ahead = at_once - len(self.running), self.device.layout.slots - at_once
        if self.waiting and places <= 0:  # nobody waits for a prompt: it comes with others
            first = min(self.waiting, key=lambda job: job.order)
            together = min(self.prompts.together(first.to_compute), len(self.waiting), ahead)
            free -= free % max(together, 1)
        return planned(
            self.waiting, self.running, self.holdings, chunk=self.prompts.smallest,
            burst=self.prompts.now, each=self.prompts.each,
            slots=free, places=places, still=self.held or self.asleep,
        )  # fmt: skip

    def _step_with_forms(self, jobs: Sequence[Job]) -> Read:
        """A step of these requests, some of which have a grammar. The others take part before the
        steps of a call, which keeps the device at work while the host makes masks; who got its
        pages before the first grammar came may lack those for one step more."""
        taking = [job for job in jobs if job.matcher or not self.holdings.short(job)]
        most = self.device.layout.shape.batch
        return self._call(self.device.step_with_forms, taking[:most], most, most)

    def _call(
        self, program: Callable[..., Read], jobs: Sequence[Job], count: int, given: int
    ) -> Read:
        """The next steps of these requests, in a call that steps `count` of `given` slots."""
        read = program(jobs, count, *self.holdings.tables(jobs, given))
        self._count(calls=1, live=min(len(jobs), count))
        self.roster.drop_failed(jobs)
        return read

    def drain(self, on_events: OnEvents) -> None:
        """Reads all that was dispatched."""
        while self._unread:
            self._unread.read_next()
            self.tell(on_events)
