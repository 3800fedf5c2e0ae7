"""One device, driven by one thread: a round is planned, dispatched, and read one round later.

Nothing here changes a request's text: a preempted one computes its keys and values again and
continues from its newest token. This file knows only token ids.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from jflash.kernels import AUTO
from jflash.serving.constrained import Constrained, compile_constrained
from jflash.serving.device_time import DeviceTime, UnderWay
from jflash.serving.events import first_token, gained, keep_prompt_scores, tokens_of_calls
from jflash.serving.grammar import GrammarError, fill
from jflash.serving.holdings import Holdings
from jflash.serving.job import Counts, Job, Read
from jflash.serving.packing import Report, Row, Taken, mask_words, packed
from jflash.serving.planning import planned
from jflash.serving.programs import Programs, choosing, compile_programs
from jflash.serving.request import Event, FinishReason
from jflash.serving.schedule import Plan
from jflash.serving.slots import Layout, empty_state
from jflash.speculative import Models, Params

OnEvent = Callable[[Job, Event], None]


class Loop:
    """The device's state, the pages and the slots; used by one thread.

    At most `burst` chunks of prompts run between two calls of steps, and once the device has shown
    how long one takes, only as many as fit into `stall` seconds, at least one.
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
        self.models, self.params, self.layout = models, params, layout
        self.programs: Programs = compile_programs(models, params, layout)
        auto = models.rows == AUTO and "greedy" in layout.kinds
        self.rows = choosing(models, params, layout, self.programs) if auto else None
        self.state = empty_state(models, layout)
        self.holdings = Holdings(models, layout, self.state, salt)
        self.held = self.asleep = False  # held: no new text begins
        self.version = 0  # of the parameters
        self.slots: list[Job | None] = [None] * layout.shape.batch
        self.waiting = list[Job]()
        self.counts = Counts()
        self.time = DeviceTime()
        self._constrained: Constrained | None = None
        self._free = jax.device_put(np.full(mask_words(models), -1, np.int32))
        self._burst, self._stall = burst, stall
        self._rounds = deque[list[Read]]()

    @property
    def running(self) -> list[Job]:
        return [job for job in self.slots if job is not None]

    @property
    def quiet(self) -> bool:
        """Whether no text is under way; requests that have no token yet may wait."""
        return not (self.running or self._rounds or any(job.begun for job in self.waiting))

    @property
    def burst(self) -> int:
        """The chunks of the smallest size that may run now between two calls of steps."""
        sizes = sorted(self.programs.chunk)
        for size in reversed(sizes):
            if seconds := self.time.lasted("prefill_seconds", size):
                most = self._stall / seconds * (size // sizes[0])
                return max(1, int(min(self._burst, most)))
        return self._burst

    def prepare_grammars(self) -> None:
        """Compiles what requests with a grammar need, before the first of them comes."""
        if self._constrained is None:
            self._constrained = compile_constrained(self.models, self.params, self.layout)

    def new_weights(self, params: Params) -> None:
        """Takes other parameters of the same shapes; the loop must be quiet."""
        assert self.quiet, "a text is of one version"
        self.params = params
        self.version += 1
        self.holdings.forget_all()

    def sleep(self) -> None:
        """Frees the state's memory; the loop must be quiet."""
        assert self.quiet, "pages in use"
        self.holdings.forget_all()
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.asleep = True

    def wake(self) -> None:
        """Allocates an empty state after `sleep`."""
        if self.asleep:
            self.state = empty_state(self.models, self.layout)
        self.asleep = False

    @property
    def idle(self) -> bool:
        able = [job for job in self.waiting if job.cancelled or not self.asleep]
        return not (able or self.running or self._rounds or self.patience == 0)

    @property
    def patience(self) -> float | None:
        """Seconds until the first waiting request times out, which it does asleep too."""
        deadlines = [job.deadline for job in self.waiting if job.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def round(self, on_event: OnEvent) -> None:
        """Plans and dispatches a round, then reads the one before it."""
        for job in [job for job in (*self.waiting, *self.running) if job.cancelled]:
            self._end(job, "cancelled", on_event)
        if any(job.matcher for job in self.running):
            self.drain(on_event)  # masks are of the whole text
        what = self._plan()
        if what.preempted and self._rounds:
            self.drain(on_event)  # tokens that are on their way are not computed twice
            what = self._plan()
        by_order = {job.order: job for job in (*self.waiting, *self.running)}
        jobs = lambda orders: [by_order[order] for order in orders]  # noqa: E731
        for job in jobs(what.expired):
            self._end(job, "timeout", on_event)
        for job in jobs(what.preempted):
            self.preempt(job)
        for job in jobs(what.grown):
            self.holdings.grow(job)
        for job in jobs(what.admitted):
            self._admit(job)
        self.time.begin()
        chunked = jobs(what.chunks)
        reads = [
            self._chunk(job, size)
            for job, run in itertools.groupby(chunked)
            if job.slot is not None
            for size in self._sizes(job, len(list(run)))
        ]
        # A first token waits for no step: it is given out before the next call is dispatched.
        if any(read.first for read in reads):
            self._read(reads, on_event)
            reads = []
        ready = {id(job): job for job in chunked if not job.end}.values()
        stepping = [job for job in (*jobs(what.steps), *ready) if job.slot is not None]
        if any(job.matcher for job in stepping):
            self._read(reads, on_event)
            reads, stepping = [], [job for job in stepping if job.reason is None]
        if any(job.matcher for job in stepping):
            reads.append(self._constrained_call(stepping))
        elif stepping:
            reads.append(self._call(stepping))
        if reads:
            self._rounds.append(reads)
        while len(self._rounds) > bool(reads):
            self._read(self._rounds.popleft(), on_event)

    def preempt(self, job: Job) -> None:
        """Takes slot and pages from a request, which waits again; all calls must be read."""
        assert not self._rounds, "tokens on their way would be lost"
        self._leave(job)
        self.waiting.append(job)
        self._count(preempted=1)

    def drop(self) -> Iterable[Job]:
        """All requests that have not ended, after a failure."""
        return [*self.waiting, *self.running]

    def _plan(self) -> Plan:
        return planned(
            self.waiting, self.running, self.holdings, chunk=min(self.programs.chunk),
            slots=self.slots.count(None), burst=self.burst, still=self.held or self.asleep,
        )  # fmt: skip

    def _admit(self, job: Job) -> None:
        """Gives a slot and pages, if there are still as many pages as planned."""
        if not self.holdings.admit(job):
            return
        self.waiting.remove(job)
        job.slot = self.slots.index(None)
        self.slots[job.slot] = job
        job.end, job.unread, job.gained = job.to_compute, 0, False
        if job.cached is None:
            job.cached = job.computed
            self._count(prompt_tokens=job.end, cached_tokens=job.cached)
        row = Row(job.slot, job.request, job.seed, job.tokens)
        self.state = self.programs.admit(
            self.state, packed(row, self.layout, self.models.max_accept)
        )

    def _sizes(self, job: Job, chunks: int) -> Iterator[int]:
        """Passes for so many chunks of a text; a larger one pays if half of it is the text's."""
        one = min(self.programs.chunk)
        rest = min(chunks * one, job.end - job.computed)
        while rest > 0:
            fitting = [size for size in self.programs.chunk if size == one or 2 * rest > size]
            yield max(fitting)
            rest -= max(fitting)

    def _chunk(self, job: Job, size: int) -> Read:
        offset = job.computed
        assert job.slot is not None
        last = offset + size >= job.end
        commits = last and not job.begun
        scores = job.request.prompt_logprobs is not None and not job.begun
        control = np.array([job.slot, offset, job.end, last, commits, scores], np.int32)
        table = self.holdings.table(job, offset, offset + size)
        allowed = self._free
        if commits and job.matcher is not None:
            masks = np.full((1, 1, len(allowed)), -1, np.int32)
            fill(masks, [(0, job.matcher, ())])
            allowed = masks[0, 0]
            self._drop_failed([job])
        began, program = time.perf_counter(), self.programs.chunk[size]
        self.state, out = program(self.params, self.state, table, control, allowed)
        self.time.dispatched(UnderWay("prefill_seconds", size, began, out.first))
        job.computed = min(offset + size, job.end)
        self.holdings.name(job, job.computed)
        if last:
            job.end = 0
        scored = range(offset + 1, min(offset + size + 1, len(job.request.prompt_ids)))
        return Read(out, job, first=commits, scored=scored if scores else range(0))

    def _call(self, jobs: Sequence[Job]) -> Read:
        live, table = self.holdings.tables(jobs)
        greedy, program = self.programs.greedy, self.programs.drawn
        rows = max(greedy, default=0)
        if program is None or (greedy and not any(job.request.needs_logits for job in jobs)):
            rows = rows if self.rows is None else self.rows.pick()[0]
            program = greedy[rows]
        began = time.perf_counter()
        self.state, report = program(self.params, self.state, table, live)
        self.time.dispatched(UnderWay("decode_seconds", rows, began, report.numbers))
        return self._called(jobs, rows, report, self.layout.steps)

    def _constrained_call(self, jobs: Sequence[Job]) -> Read:
        """One step; the host computes the masks while the device verifies the drafts."""
        programs = self._constrained
        assert programs is not None, "the engine prepares it before the first such request"
        live, table = self.holdings.tables(jobs)
        began = time.perf_counter()
        self.state, begun = programs.propose(self.params, self.state, table, live)
        begun.proposal.tokens.copy_to_host_async()
        self.state, seen = programs.look(self.params, self.state, table, begun)
        drafts = np.asarray(begun.proposal.tokens)
        words = mask_words(self.models)
        masks = np.full((len(self.slots), self.models.block_size, words), -1, np.int32)
        blocks = []
        for job in jobs:
            if job.matcher is not None and job.slot is not None:
                blocks.append((job.slot, job.matcher, drafts[job.slot].tolist()))
        fill(masks, blocks)
        self._drop_failed(jobs)
        self.state, report = programs.decide(self.params, self.state, table, begun, seen, masks)
        rows = max(self.programs.greedy, default=0)
        self.time.dispatched(UnderWay("decode_seconds", rows, began, report.numbers))
        return self._called(jobs, rows, report, 1)

    def _called(self, jobs: Sequence[Job], rows: int, report: Report, steps: int) -> Read:
        """Notes a dispatched call, whose report is on its way."""
        for job in jobs:
            job.unread += 1
        if self.rows is not None:
            self.rows.ran(rows, report.survey)
        if not any(job.request.top_logprobs for job in jobs):
            report = report._replace(tops=None)
        jax.copy_to_host_async((report.numbers, report.tops))
        self._count(calls=1, live=len(jobs))
        return Read(report=report, jobs=tuple(jobs), steps=steps)

    def drain(self, on_event: OnEvent) -> None:
        """Reads all dispatched calls."""
        while self._rounds:
            self._read(self._rounds.popleft(), on_event)

    def _read(self, reads: list[Read], on_event: OnEvent) -> None:
        for read in reads:
            if read.chunk is not None:
                self._read_chunk(read, on_event)
                continue
            assert read.report is not None
            self._count(**self.time.wait_for(read.report.numbers))
            for job, given in tokens_of_calls(read, self.models.block_size):
                job.unread -= 1
                self._gain(job, given, on_event)

    def _read_chunk(self, read: Read, on_event: OnEvent) -> None:
        """A chunk's logprobs of the prompt, and its first token."""
        job, chunk = read.job, read.chunk
        assert job is not None and chunk is not None
        self._count(**self.time.wait_for(chunk.first))
        if job.reason is not None:
            return
        if read.scored:
            keep_prompt_scores(job, read, chunk)
        if read.first:
            self._gain(job, first_token(job, chunk), on_event)

    def _gain(self, job: Job, given: Taken, on_event: OnEvent) -> None:
        """Adds the tokens of some steps; the last one may end the text."""
        for event in gained(job, given, self.models.max_accept, self.version):
            new = len(event.token_ids)
            self._count(new_tokens=new, drafted=event.drafted, accepted=event.accepted)
            on_event(job, event)
            job.reason = event.finish_reason
        job.gained |= bool(given.steps)
        self.holdings.name(job, len(job.tokens) - 1)
        if job.reason:
            self._leave(job)
        self._drop_failed([job])

    def _count(self, **more: int | float) -> None:
        now = {name: getattr(self.counts, name) + value for name, value in more.items()}
        self.counts = self.counts._replace(**now)

    def _drop_failed(self, jobs: Sequence[Job]) -> None:
        """Ends requests whose grammar cannot be followed; calls on their way are not read."""
        for job in jobs:
            if job.matcher is not None and job.matcher.error and job.reason is None:
                job.reason = "failed"
                self._leave(job)
                job.handle.fail(GrammarError(job.matcher.error))

    def _end(self, job: Job, reason: FinishReason, on_event: OnEvent) -> None:
        """Ends a waiting or running request early."""
        job.reason = reason
        if job in self.waiting:
            self.waiting.remove(job)
        self._leave(job)
        end = Event((), cached_tokens=job.cached or 0, finish_reason=reason, version=self.version)
        on_event(job, end)

    def _leave(self, job: Job) -> None:
        """Gives slot and pages back."""
        if job.slot is not None:
            self.slots[job.slot] = None
            self.holdings.leave(job)
            job.slot = None
