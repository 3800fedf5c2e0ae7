"""One device, driven by one thread: a round is planned, dispatched, and read one round later.

Nothing here changes a request's text: a preempted one computes its keys and values again and
continues from its newest token. This file knows only token ids.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from jflash.cache import PagedCache
from jflash.kernels import AUTO
from jflash.serving.constrained import Constrained, compile_constrained
from jflash.serving.grammar import GrammarError, fill
from jflash.serving.job import Counts, Job, Read, UnderWay
from jflash.serving.packing import Report, Row, Taken, floats, mask_words, packed, taken, tops_of
from jflash.serving.pages import Pages, chain
from jflash.serving.programs import Chunked, Programs, choosing, compile_programs
from jflash.serving.request import Event, FinishReason
from jflash.serving.schedule import Plan, Running, Waiting, plan
from jflash.serving.sliding import Held, Sliding
from jflash.serving.slots import Layout, empty_state, sliding
from jflash.speculative import Models, Params
from pallas_kernels.block_attention import PAGE

LOOKED_AT = 64  # waiting requests that a round considers at most


class Loop:
    """The device's state, the pages and the slots; used by one thread.

    At most `burst` chunks of prompts run between two calls of steps.
    """

    def __init__(
        self, models: Models, params: Params, layout: Layout, salt: bytes, burst: int = 4
    ) -> None:
        self.models, self.params, self.layout = models, params, layout
        self.programs: Programs = compile_programs(models, params, layout)
        auto = models.rows == AUTO and "greedy" in layout.kinds
        self.rows = choosing(models, params, layout, self.programs) if auto else None
        self.state = empty_state(models, layout)
        # A state that is not in pages, a recurrent one, is in no prefix.
        layers = (*self.state.target_cache, *self.state.drafter_cache)
        self._paged = all(isinstance(layer, PagedCache) for layer in layers)
        self.held = self.asleep = False  # held: no new text begins
        self.version = 0  # of the parameters
        self.pages = Pages(layout.pages)
        self.sliding = Sliding(sliding(models, layout))
        self.slots: list[Job | None] = [None] * layout.shape.batch
        self.waiting = list[Job]()
        self.counts = Counts()
        self._constrained: Constrained | None = None
        self._free = jax.device_put(np.full(mask_words(models), -1, np.int32))
        self._salt, self._burst = salt, burst
        self._rounds = deque[list[Read]]()
        self._under_way = deque[UnderWay]()  # in order
        self._since = self._busy_until = time.perf_counter()
        self._lasted = dict[tuple[str, int], float]()  # seconds of each program, when last seen
        self._no_pages = np.full(layout.columns, layout.pages, np.int32)
        self._no_pages = np.append(self._no_pages, self.sliding.row(Held(), layout.columns))
        self._tables = np.tile(self._no_pages, (layout.shape.batch, 1))

    @property
    def running(self) -> list[Job]:
        return [job for job in self.slots if job is not None]

    @property
    def quiet(self) -> bool:
        """Whether no text is under way; requests that have no token yet may wait."""
        return not (self.running or self._rounds or any(job.begun for job in self.waiting))

    def prepare_grammars(self) -> None:
        """Compiles what requests with a grammar need, before the first of them comes."""
        if self._constrained is None:
            self._constrained = compile_constrained(self.models, self.params, self.layout)

    def new_weights(self, params: Params) -> None:
        """Takes other parameters of the same shapes; the loop must be quiet."""
        assert self.quiet, "a text is of one version"
        self.params = params
        self.version += 1
        self.pages.forget_all()
        self.sliding.pages.forget_all()

    def sleep(self) -> None:
        """Frees the state's memory; the loop must be quiet."""
        assert self.quiet, "pages in use"
        self.pages.forget_all()
        self.sliding.pages.forget_all()
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

    def round(self, on_event: Callable[[Job, Event], None]) -> None:
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
            self._grow(job)
        for job in jobs(what.admitted):
            self._admit(job)
        if not self._under_way:
            self._since = time.perf_counter()
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
        self.counts = self.counts._replace(preempted=self.counts.preempted + 1)

    def drop(self) -> Iterable[Job]:
        """All requests that have not ended, after a failure."""
        return [*self.waiting, *self.running]

    def _plan(self) -> Plan:
        chunk = self.layout.shape.chunk
        waiting = []
        still = self.held or self.asleep
        coming = [job for job in self.waiting if job.begun or not still]
        for job in sorted(coming, key=lambda job: job.order)[:LOOKED_AT]:
            end = self._end_of(job)
            cached = self._cached_pages(job, end)
            fresh = self._needs(job, 1) - self.pages.held(cached)
            chunks = -(-(end - len(cached) * PAGE) // chunk)
            waiting.append(Waiting(job.order, fresh, chunks, job.deadline))
        late = [job for job in self.waiting if job.deadline and job.deadline <= time.monotonic()]
        seen = {w.order for w in waiting}
        waiting += [Waiting(j.order, 0, 0, j.deadline) for j in late if j.order not in seen]
        running = [
            Running(
                job.order,
                -(-(job.end - job.computed) // chunk) if job.end else 0,
                0 if job.end else max(0, self._needs(job, job.unread + 1) - len(job.pages)),
                self.pages.held_by_one(job.pages),
                job.gained,
                job.deadline,
            )
            for job in self.running
        ]
        free = len(self.slots) - len(running)
        return plan(
            waiting, running, slots=free, pages=self.pages.available, clock=time.monotonic(),
            burst=self._burst,
        )  # fmt: skip

    def _needs(self, job: Job, calls: int) -> int:
        """The pages for `calls` more calls than the host has read."""
        ahead = calls * self.layout.steps * self.models.block_size + (not job.begun)
        return -(-min(job.limit, len(job.tokens) + ahead) // PAGE)

    def _end_of(self, job: Job) -> int:
        """The number of tokens that chunks compute: all, without the newest once it has begun."""
        return len(job.tokens) - job.begun

    def _cached_pages(self, job: Job, end: int) -> list[int]:
        """The cached pages of its text; the last token is always computed, and all of a prompt
        whose logprobs are asked. A recurrent state is not cached."""
        whole = job.request.prompt_logprobs is not None and not job.begun
        if whole or not self._paged:
            return []
        job.names = chain(
            job.tokens[: end - end % PAGE], self._salt + job.request.cache_salt.encode(), job.names
        )
        cached = self.pages.find(job.names[: (end - 1) // PAGE])
        return cached[: self.sliding.shortened(job.names[: len(cached)])]

    def _admit(self, job: Job) -> None:
        """Gives a slot and pages, if there are still as many pages as planned."""
        end = self._end_of(job)
        cached = self._cached_pages(job, end)
        self.pages.hold(cached)
        fresh = self.pages.take(self._needs(job, 1) - len(cached))
        if fresh is None:
            self.pages.release(cached)
            return
        self.waiting.remove(job)
        job.seen = self.sliding.admit(job.names[: len(cached)])
        job.slot = self.slots.index(None)
        self.slots[job.slot] = job
        job.pages, job.named = [*cached, *fresh], len(cached)
        job.computed, job.end = len(cached) * PAGE, end
        job.unread, job.gained = 0, False
        self._write_table(job)
        if job.cached is None:
            job.cached = len(cached) * PAGE
            self.counts = self.counts._replace(
                prompt_tokens=self.counts.prompt_tokens + end,
                cached_tokens=self.counts.cached_tokens + job.cached,
            )
        row = Row(job.slot, job.request, job.seed, job.tokens)
        self.state = self.programs.admit(
            self.state, packed(row, self.layout, self.models.max_accept)
        )

    def _grow(self, job: Job) -> None:
        more = self.pages.take(self._needs(job, job.unread + 1) - len(job.pages))
        assert more is not None, "the plan counted the pages"
        job.pages += more
        self._write_table(job)

    def _write_table(self, job: Job) -> None:
        assert job.slot is not None
        row = self._no_pages.copy()
        row[: len(job.pages)] = job.pages
        row[self.layout.columns :] = self.sliding.row(job.seen, self.layout.columns)
        self._tables[job.slot] = row

    def _slide(self, job: Job, position: int, end: int) -> None:
        """Pages of layers with windows for the rows from `position` to `end`, and the table."""
        self.sliding.slide(job.seen, position, min(-(-end // PAGE), len(job.pages)))
        self._write_table(job)

    def _sizes(self, job: Job, chunks: int) -> Iterator[int]:
        """Passes for so many chunks of a text; a larger one pays if half of it is the text's."""
        one = self.layout.shape.chunk
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
        self._slide(job, offset, offset + size)
        table = self._tables[job.slot : job.slot + 1].copy()
        allowed = self._free
        if commits and job.matcher is not None:
            masks = np.full((1, 1, len(allowed)), -1, np.int32)
            fill(masks, [(0, job.matcher, ())])
            allowed = masks[0, 0]
            self._drop_failed([job])
        began, program = time.perf_counter(), self.programs.chunk[size]
        self.state, out = program(self.params, self.state, table, control, allowed)
        self._under_way.append(UnderWay("prefill_seconds", 0, began, out.first))
        job.computed = min(offset + size, job.end)
        self._name(job, job.computed)
        if last:
            job.end = 0
        scored = range(offset + 1, min(offset + size + 1, len(job.request.prompt_ids)))
        return Read(out, job, first=commits, scored=scored if scores else range(0))

    def _call(self, jobs: Sequence[Job]) -> Read:
        live, table = self._places(jobs)
        greedy, program = self.programs.greedy, self.programs.drawn
        rows = max(greedy, default=0)
        if program is None or (greedy and not any(job.request.needs_logits for job in jobs)):
            rows = rows if self.rows is None else self.rows.pick()[0]
            program = greedy[rows]
        began = time.perf_counter()
        self.state, report = program(self.params, self.state, table, live)
        self._under_way.append(UnderWay("decode_seconds", rows, began, report.numbers))
        return self._called(jobs, rows, report, self.layout.steps)

    def _constrained_call(self, jobs: Sequence[Job]) -> Read:
        """One step; the host computes the masks while the device verifies the drafts."""
        programs = self._constrained
        assert programs is not None, "the engine prepares it before the first such request"
        live, table = self._places(jobs)
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
        self._under_way.append(UnderWay("decode_seconds", rows, began, report.numbers))
        return self._called(jobs, rows, report, 1)

    def _places(self, jobs: Sequence[Job]) -> tuple[np.ndarray, np.ndarray]:
        """The slots that step, and their pages."""
        live = np.zeros(len(self.slots), bool)
        for job in jobs:
            live[job.slot] = True
            self._slide(job, len(job.tokens) - 1, len(job.pages) * PAGE)
        return live, np.where(live[:, None], self._tables, self._no_pages)

    def _called(self, jobs: Sequence[Job], rows: int, report: Report, steps: int) -> Read:
        """Notes a dispatched call, whose report is on its way."""
        for job in jobs:
            job.unread += 1
        if self.rows is not None:
            self.rows.ran(rows, report.survey)
        if not any(job.request.top_logprobs for job in jobs):
            report = report._replace(tops=None)
        jax.copy_to_host_async((report.numbers, report.tops))
        counts = self.counts
        self.counts = counts._replace(calls=counts.calls + 1, live=counts.live + len(jobs))
        return Read(report=report, jobs=tuple(jobs), steps=steps)

    def drain(self, on_event: Callable[[Job, Event], None]) -> None:
        """Reads all dispatched calls."""
        while self._rounds:
            self._read(self._rounds.popleft(), on_event)

    def _read(self, reads: list[Read], on_event: Callable[[Job, Event], None]) -> None:
        for read in reads:
            if read.chunk is not None:
                self._read_chunk(read, read.chunk, on_event)
                continue
            assert read.report is not None
            self._wait_for(read.report.numbers)
            numbers = np.asarray(read.report.numbers)
            tops = None if read.report.tops is None else np.asarray(read.report.tops)
            for job in read.jobs:
                if job.reason is None:
                    assert job.slot is not None, "who leaves a slot has read all of its calls"
                    job.unread -= 1
                    likely = None if tops is None else tops[job.slot]
                    width = self.models.block_size
                    self._gain(job, taken(numbers[job.slot], likely, width, read.steps), on_event)

    def _wait_for(self, array: jax.Array) -> None:
        """Waits, and counts the seconds of what the device computed up to it."""
        if all(each.array is not array for each in self._under_way):
            return  # a later one was waited for before: what is under way now comes after both
        while True:
            one = self._under_way.popleft()
            late = one.array.is_ready()
            jax.block_until_ready(one.array)
            now, seconds = time.perf_counter(), getattr(self.counts, one.part)
            begin, kind = max(one.dispatched, self._busy_until), (one.part, one.rows)
            lasted = max(now - begin, 0.0)
            if late:  # it ended unseen: it took as long as the last one that was seen to end
                lasted = min(lasted, self._lasted.get(kind, lasted))
            else:
                self._lasted[kind] = lasted
            self._busy_until = begin + lasted
            self.counts = self.counts._replace(
                **{one.part: seconds + now - self._since},
                busy_seconds=self.counts.busy_seconds + lasted,
            )
            self._since = now
            if one.array is array:
                return

    def _read_chunk(
        self, read: Read, chunk: Chunked, on_event: Callable[[Job, Event], None]
    ) -> None:
        """A chunk's logprobs of the prompt, and its first token."""
        job = read.job
        assert job is not None
        self._wait_for(chunk.first)
        if job.reason is not None:
            return
        if read.scored:
            count = len(read.scored)
            job.prompt_logprobs += floats(np.asarray(chunk.chosen))[:count].tolist()
            if job.request.prompt_logprobs:
                job.prompt_tops += tops_of(np.asarray(chunk.tops)[:count])
        if read.first:
            array = np.asarray(chunk.first)
            tops = [tops_of(np.asarray(chunk.first_top))] if job.request.top_logprobs else None
            given = Taken([[int(array[0])]], [floats(array[2:]).tolist()], bool(array[1]), tops)
            self._gain(job, given, on_event)

    def _gain(
        self,
        job: Job,
        given: Taken,
        on_event: Callable[[Job, Event], None],
    ) -> None:
        """Adds the tokens of some steps; the last one may end the text."""
        counts = self.counts
        for i, ids in enumerate(given.steps):
            drafted = accepted = 0
            if job.begun and job.request.speculate:
                drafted = min(self.models.max_accept, job.limit - len(job.tokens))
                accepted = len(ids) - 1
            job.tokens += ids
            if job.matcher is not None:
                job.matcher.take(ids)
            reason: FinishReason | None = None
            if given.done and i == len(given.steps) - 1:
                reason = "stop" if ids[-1] in job.request.stop_ids else "length"
            counts = counts._replace(
                new_tokens=counts.new_tokens + len(ids),
                drafted=counts.drafted + drafted,
                accepted=counts.accepted + accepted,
            )
            event = Event(tuple(ids), drafted, accepted, job.cached or 0, reason)
            on_event(job, self._scored(job, event, given, i))
            job.reason = reason
        self.counts = counts
        job.gained |= bool(given.steps)
        self._name(job, len(job.tokens) - 1)
        if job.reason:
            self._leave(job)
        self._drop_failed([job])

    def _drop_failed(self, jobs: Sequence[Job]) -> None:
        """Ends requests whose grammar cannot be followed; calls on their way are not read."""
        for job in jobs:
            if job.matcher is not None and job.matcher.error and job.reason is None:
                job.reason = "failed"
                self._leave(job)
                job.handle.fail(GrammarError(job.matcher.error))

    def _scored(self, job: Job, event: Event, given: Taken, step: int) -> Event:
        """The event of a step with the numbers that the request asks for."""
        request, new = job.request, {}
        if request.logprobs:
            new["logprobs"] = tuple(given.logprobs[step])
        if request.top_logprobs:
            assert given.tops is not None, "read with the report"
            new["top_logprobs"] = tuple(top[: request.top_logprobs] for top in given.tops[step])
        first = len(job.tokens) == len(request.prompt_ids) + 1
        if first and request.prompt_logprobs is not None:
            new["prompt_logprobs"] = tuple(job.prompt_logprobs)
            if request.prompt_logprobs:
                tops = (top[: request.prompt_logprobs] for top in job.prompt_tops)
                new["prompt_top_logprobs"] = tuple(tops)
        return event._replace(version=self.version, **new)

    def _name(self, job: Job, computed: int) -> None:
        """Indexes the pages whose tokens are all computed."""
        if not self._paged:
            return
        whole = min(computed // PAGE, len(job.pages))
        job.names = chain(
            job.tokens[: max(whole, len(job.names)) * PAGE],
            self._salt + job.request.cache_salt.encode(),
            job.names,
        )
        for i in range(job.named, whole):
            self.pages.name(job.pages[i], job.names[i])
        self.sliding.name(job.seen, job.names[:whole])
        job.named = max(job.named, whole)

    def _end(self, job: Job, reason: FinishReason, on_event: Callable[[Job, Event], None]) -> None:
        """Ends a waiting or running request early."""
        job.reason = reason
        if job in self.waiting:
            self.waiting.remove(job)
        self._leave(job)
        end = Event((), cached_tokens=job.cached or 0, finish_reason=reason, version=self.version)
        on_event(job, end)

    def _leave(self, job: Job) -> None:
        """Gives slot and pages back.

        Dispatched calls may still write these pages; their next holder is dispatched later.
        """
        if job.slot is not None:
            self.slots[job.slot] = None
            self.pages.release(job.pages)
            self.sliding.leave(job.seen)
            job.slot, job.pages = None, []
