"""The engine's programs at work on one state: each method dispatches some, and waits for none.

This file knows requests with their slots and tables, and no queue.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jflash.kernels import AUTO
from jflash.pair import Models, Params
from jflash.serving.constrained import Constrained, compile_constrained
from jflash.serving.copies import Copies
from jflash.serving.device_time import DeviceTime, UnderWay
from jflash.serving.grammar import fill
from jflash.serving.job import Job, Read
from jflash.serving.packing import Report, Row, mask_words, packed
from jflash.serving.prefill import Computed
from jflash.serving.programs import Programs, choosing, compile_programs
from jflash.serving.schedule import Pass
from jflash.serving.slots import Layout, empty_state


class Device:
    """The state and the programs of one layout; used by one thread."""

    def __init__(self, models: Models, params: Params, layout: Layout) -> None:
        self.models, self.params, self.layout = models, params, layout
        self.programs: Programs = compile_programs(models, params, layout)
        auto = models.rows == AUTO and "greedy" in layout.kinds
        self.rows = choosing(models, params, layout, self.programs) if auto else None
        self.state = empty_state(models, layout)
        self.copies = Copies(models, layout)
        self.time = DeviceTime()
        self._constrained: Constrained | None = None
        self._free = jax.device_put(np.full(mask_words(models), -1, np.int32))

    def prepare_grammars(self) -> None:
        """Compiles what requests with a grammar need, before the first of them comes."""
        if self._constrained is None:
            self._constrained = compile_constrained(self.models, self.params, self.layout)

    def sleep(self) -> None:
        """Frees the state's memory."""
        for leaf in jax.tree.leaves((self.state, self.copies.arrays)):
            leaf.delete()

    def wake(self) -> None:
        """Allocates an empty state after `sleep`."""
        self.state = empty_state(self.models, self.layout)
        self.copies.clear()

    def admit(self, job: Job) -> None:
        """Puts the request into its slot, with the states that its prefix has."""
        assert job.slot is not None
        began = time.perf_counter()
        row = Row(job.slot, job.request, job.seed, job.tokens)
        self.state = self.programs.admit(
            self.state, packed(row, self.layout, self.models.max_accept)
        )
        if job.origin is not None:
            self.state = self.copies.put(self.state, job.slot, job.origin, job.computed)
        self.time.dispatching += time.perf_counter() - began

    def keep(self, job: Job, place: int) -> None:
        """Copies its states, after a pass that ended at a border of pages."""
        assert job.slot is not None
        began = time.perf_counter()
        self.copies.keep(self.state, job.slot, place, job.computed)
        self.time.dispatching += time.perf_counter() - began

    def chunk(self, job: Job, over: Pass, table: np.ndarray) -> Read:
        """Computes the tokens of its text up to `over.end`; after the last, the slot steps."""
        offset, began, request = job.computed, time.perf_counter(), job.request
        size, end = over
        last = end == job.end
        control = np.array([job.slot, offset, end, last and job.begun], np.int32)
        self.state, computed = self.programs.chunk[size](self.params, self.state, table, control)
        read = Read(computed.newest, job)
        if request.prompt_logprobs is not None and not job.begun:
            read = self._scored(read, over, computed)
        if last and not job.begun:
            read = self._first(read, computed)
        self.time.dispatched(UnderWay("prefill_seconds", size, began, read.filled))
        job.computed = end
        job.end = 0 if last else job.end
        return read

    def _first(self, read: Read, computed: Computed) -> Read:
        """The token that follows the prompt, of those that its grammar allows."""
        job, allowed = read.job, self._free
        assert job is not None
        if job.matcher is not None:
            masks = np.full((1, 1, len(allowed)), -1, np.int32)
            fill(masks, [(0, job.matcher, ())])
            allowed = masks[0, 0]
        # Without a program of steps for greedy requests alone, all texts come from one kind.
        draws = job.request.needs_logits or job.matcher is not None
        kind = "drawn" if draws or "greedy" not in self.layout.kinds else "greedy"
        sequences, first = self.programs.first[kind](
            self.params, self.state.sequences, computed.newest,
            np.array([job.slot, job.end], np.int32), allowed,
        )  # fmt: skip
        self.state = self.state._replace(sequences=sequences)
        jax.copy_to_host_async((first.token, first.top if job.request.top_logprobs else None))
        return read._replace(filled=first.token, first=first)

    def _scored(self, read: Read, over: Pass, computed: Computed) -> Read:
        """The logprobs of the prompt's tokens after the chunk's."""
        assert read.job is not None
        begin, following = read.job.computed + 1, np.zeros(over.size, np.int32)
        tokens = read.job.request.prompt_ids[begin : over.end + 1]
        following[: len(tokens)] = tokens
        scored = self.programs.score[over.size](self.params, computed.hidden, following)
        return read._replace(filled=scored[0], scored=scored, count=len(tokens))

    def call(self, jobs: Sequence[Job], live: np.ndarray, table: np.ndarray) -> Read:
        """A call of steps of these requests."""
        greedy, program = self.programs.greedy, self.programs.drawn
        rows = max(greedy, default=0)
        if program is None or (greedy and not any(job.request.needs_logits for job in jobs)):
            rows = rows if self.rows is None else self.rows.pick()[0]
            program = greedy[rows]
        began = time.perf_counter()
        self.state, report = program(self.params, self.state, table, live)
        self.time.dispatched(UnderWay("decode_seconds", rows, began, report.numbers))
        return self._called(jobs, rows, report, self.layout.steps)

    def constrained_call(self, jobs: Sequence[Job], live: np.ndarray, table: np.ndarray) -> Read:
        """One step; the host computes the masks while the device verifies the drafts."""
        programs = self._constrained
        assert programs is not None, "the engine prepares it before the first such request"
        began = time.perf_counter()
        self.state, begun = programs.propose(self.params, self.state, table, live)
        begun.proposal.tokens.copy_to_host_async()
        self.state, seen = programs.look(self.params, self.state, table, begun)
        drafts = np.asarray(begun.proposal.tokens)
        shape = (self.layout.shape.batch, self.models.block_size, mask_words(self.models))
        masks = np.full(shape, -1, np.int32)
        blocks: list[Any] = []
        for job in jobs:
            if job.matcher is not None and job.slot is not None:
                blocks.append((job.slot, job.matcher, drafts[job.slot].tolist()))
        fill(masks, blocks)
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
        return Read(report.numbers, report=report, jobs=tuple(jobs), steps=steps)
