"""The engine's programs at work on one state: each method has some dispatched, and waits for none.

To dispatch a program of many small kernels takes the host about as long as the device takes to
compute it, and almost none of that is Python. So a thread beside the engine's dispatches. This file
knows requests with their slots and tables, and no queue.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jflash.pair import Models, Params
from jflash.serving.copies import Copies
from jflash.serving.device_time import DeviceTime, Dispatched, UnderWay
from jflash.serving.forms import Forms
from jflash.serving.grammar import fill
from jflash.serving.in_order import InOrder
from jflash.serving.job import Given, Job, Read
from jflash.serving.layout import Layout, Several, several_prompts
from jflash.serving.packing import (
    FRESH,
    STEPS,
    Report,
    Row,
    mask_words,
    no_pass,
    pass_of,
    row_of,
)
from jflash.serving.prefill import First
from jflash.serving.programs import Programs, compile_programs, run_once
from jflash.serving.schedule import Pass
from jflash.serving.slots import empty_state
from jflash.serving.some_slots import Stepping, slot_counts
from jflash.serving.step_programs import StepPrograms


class Device:
    """The state and the programs of one layout; used by one thread.

    What a thread of its own does touches the state, and nothing of a request that may change.
    """

    def __init__(self, models: Models, params: Params, layout: Layout) -> None:
        self.models, self.params, self.layout = models, params, layout  # settled
        self.programs: Programs = compile_programs(models, params, layout)
        self.several = several_prompts(models, layout)
        self.counts = slot_counts(models, layout)
        self.step_programs = StepPrograms(models, params, layout, self.programs)
        if len(self.counts) > 1:  # a warm-up by requests would not reach all
            run_once(models, params, layout, self.programs)
        self.state = empty_state(models, layout)
        self.copies = Copies(models, layout)
        self.time = DeviceTime()
        self._work = InOrder("jflash-device")
        self.forms = Forms(models, layout)
        self._rows = dict[int, np.ndarray]()  # what each slot begins with
        self._fresh = set[int]()  # slots whose first pass comes
        self._most = models.max_accept
        self._free = jax.device_put(np.full(mask_words(models), -1, np.int32))

    def prepare_grammars(self) -> None:
        """Compiles what requests with a grammar need, before the first of them comes."""
        self.forms.prepare(self.params)

    def new_weights(self, params: Params) -> None:
        """Takes other parameters, for all that is dispatched from now on."""
        self._work.finish()
        self.params = params

    def sleep(self) -> None:
        """Frees the state's memory."""
        self._work.finish()
        for leaf in jax.tree.leaves((self.state, self.copies.arrays)):
            leaf.delete()
        self.forms.sleep()

    def wake(self) -> None:
        """Allocates an empty state after `sleep`."""
        self.state = empty_state(self.models, self.layout)
        self.copies.clear()

    def close(self) -> None:
        """Ends the thread that dispatches."""
        self._work.close()

    def admit(self, job: Job) -> None:
        """Puts the states that its prefix has into its slot, and notes what the slot begins with:
        the first pass over its text brings that."""
        slot, origin, computed = job.slot, job.origin, job.computed
        assert slot is not None
        row = row_of(Row(slot, job.request, job.seed, job.tokens), self.layout, self._most)
        self._rows[slot] = row
        self._fresh.discard(slot)
        if origin is None:
            self._fresh.add(slot)
            return

        def work() -> None:
            self.state = self.copies.put(self.state, slot, origin, computed)

        self._dispatch(work)

    def _pass(self, job: Job, end: int, table: np.ndarray, steps: bool) -> np.ndarray:
        """The pass up to `end` as one array."""
        slot = job.slot
        assert slot is not None
        flags = STEPS * steps + FRESH * (slot in self._fresh)
        self._fresh.discard(slot)
        return pass_of([slot, job.computed, end, flags], table, self._rows[slot])

    def together(self, job: Job, over: Pass) -> Several | None:
        """The prompts of a program that computes this pass and chooses the first token.

        None: a program of its own chooses the token, if one is to be chosen.
        """
        asks = job.request.needs_logits or job.request.prompt_logprobs is not None
        if asks or job.matcher is not None or job.begun or over.end < job.end:
            return None
        if (1, over.size) not in self.programs.whole:
            return None
        one = Several(1, over.size, 1)
        return next((each for each in self.several if each.takes(over.size)), one)

    def whole(
        self,
        some: Sequence[tuple[Job, Pass]],
        sizes: tuple[int, int],
        tables: Sequence[np.ndarray],
        none: np.ndarray,
    ) -> list[Read]:
        """Computes the ends of greedy texts' prompts and their first tokens; then the slots step.

        `sizes` are a program's prompts and tokens of each, and `none` a table without a page.
        """
        given = [
            self._pass(job, over.end, table, False)
            for (job, over), table in zip(some, tables, strict=True)
        ]
        shape, past = self.layout.shape, self.layout.slots
        given += [no_pass(past + i, none, shape) for i in range(sizes[0] - len(given))]
        packed = np.concatenate(given)

        def work() -> Given:
            began = time.perf_counter()
            self.state, first = self.programs.whole[sizes](self.params, self.state, packed)
            first.token.copy_to_host_async()
            return Given(Dispatched(first.token, began, time.perf_counter()), first)

        future = self._dispatch(work)
        self.time.follows(UnderWay("prefill_seconds", math.prod(sizes), future))
        for job, over in some:
            job.computed, job.end = over.end, 0
        return [Read(future, job, last=True, index=i) for i, (job, _) in enumerate(some)]

    def keep(self, job: Job, place: int) -> None:
        """Copies its states, after a pass that ended at a border of pages."""
        slot, computed = job.slot, job.computed
        assert slot is not None
        self._dispatch(lambda: self.copies.keep(self.state, slot, place, computed))

    def chunk(self, job: Job, over: Pass, table: np.ndarray) -> Read:
        """Computes the tokens of its text up to `over.end`; after the last, the slot steps."""
        offset, request = job.computed, job.request
        size, end = over
        ends, begun = end == job.end, job.begun
        given = self._pass(job, end, table, ends and begun)
        count, following = 0, None
        if request.prompt_logprobs is not None and not begun:
            tokens = request.prompt_ids[offset + 1 : end + 1]
            count, following = len(tokens), np.zeros(size, np.int32)
            following[:count] = tokens
        last = ends and not begun
        choose = self._first_of(job) if last else None

        def work() -> Given:
            began = time.perf_counter()
            self.state, computed = self.programs.chunk[size](self.params, self.state, given)
            filled, scored, first = computed.newest, None, None
            if following is not None:
                scored = self.programs.score[size](self.params, computed.hidden, following)
                filled = scored[0]
            if choose is not None:
                first = choose(computed.newest)
                filled = first.token
            return Given(Dispatched(filled, began, time.perf_counter()), first, scored)

        future = self._dispatch(work)
        self.time.follows(UnderWay("prefill_seconds", size, future))
        job.computed = end
        job.end = 0 if ends else job.end
        return Read(future, job, last=last, count=count)

    def _first_of(self, job: Job) -> Callable[[Any], First]:
        """Dispatches the choice of the token that follows the prompt, of those that its grammar
        allows, from the hidden row of the prompt's newest token."""
        allowed, tops = self._free, job.request.top_logprobs
        if job.matcher is not None:
            masks = np.full((1, 1, len(allowed)), -1, np.int32)
            fill(masks, [(0, job.matcher, ())])
            allowed = masks[0, 0]
        # Without a program of steps for greedy requests alone, all texts come from one kind.
        draws = job.request.needs_logits or job.matcher is not None
        kind = "drawn" if draws or "greedy" not in self.layout.kinds else "greedy"
        control = np.array([job.slot, job.end], np.int32)

        def choose(newest: Any) -> First:
            sequences, first = self.programs.first[kind](
                self.params, self.state.sequences, newest, control, allowed
            )
            self.state = self.state._replace(sequences=sequences)
            jax.copy_to_host_async((first.token, first.top if tops else None))
            return first

        return choose

    def slots_for(self, jobs: Sequence[Job]) -> int:
        """The slots of the smallest call that has a place for each of these requests, or of the
        largest call."""
        return next((count for count in self.counts if count >= len(jobs)), self.counts[-1])

    def call(self, jobs: Sequence[Job], count: int, slots: np.ndarray, table: np.ndarray) -> Read:
        """Steps of the first `count` of these requests that have not ended. Their slots are the
        first of these, unless all slots step."""
        drawn = any(job.request.needs_logits for job in jobs)
        stepping, program = self.step_programs.pick(count, min(len(jobs), count), drawn)
        tops = any(job.request.top_logprobs for job in jobs)

        def work() -> Given:
            began = time.perf_counter()
            self.state, report = program(self.params, self.state, table, slots)
            return _reported(report, tops, began)

        return self._called(jobs, stepping, self._dispatch(work), self.layout.steps)

    def step_with_forms(
        self, jobs: Sequence[Job], count: int, slots: np.ndarray, table: np.ndarray
    ) -> Read:
        """One step of these requests, of which some have a grammar. Such a one waits for masks: it
        only gets drafts if the newest such step made none for it."""
        forms = self.forms
        assert forms.programs is not None, "the engine prepares it before the first such request"
        programs, (ready, who) = forms.programs, forms.who(jobs, slots)
        tops = any(job.request.top_logprobs for job in jobs)

        def look() -> tuple[float, Any]:
            began, drafted = time.perf_counter(), forms.drafted
            self.state, forms.drafted, seen = programs.look(
                self.params, self.state, table, slots, who, drafted or programs.empty()
            )
            return began, seen

        looked = self._dispatch(look)
        masks = forms.masks(ready, slots)

        def work() -> Given:
            began, seen = looked.result()
            self.state, forms.drafted, drafts, report = programs.decide(
                self.params, self.state, table, slots, who, forms.drafted, seen, masks
            )
            drafts.copy_to_host_async()
            return _reported(report, tops, began)._replace(drafts=drafts)

        stepping = Stepping(count, count * self.models.block_size)
        read = self._called(ready, stepping, self._dispatch(work), 1)
        forms.follows(jobs, slots, read.given)
        return read

    def _dispatch[T](self, work: Callable[[], T]) -> Future[T]:
        """Has the work done in order, and counts its time."""

        def timed() -> T:
            began = time.perf_counter()
            done = work()
            self.time.dispatching += time.perf_counter() - began
            return done

        return self._work.do(timed)

    def _called(
        self, jobs: Sequence[Job], stepping: Stepping, given: Future[Given], steps: int
    ) -> Read:
        """Notes a call that is or will be dispatched."""
        self.time.follows(UnderWay("decode_seconds", stepping, given, steps))
        slots = tuple(job.slot for job in jobs if job.slot is not None)
        read = Read(given, jobs=tuple(jobs), slots=slots, steps=steps, stepping=stepping)
        read.count_unread(steps)
        return read

    def learn(self, read: Read, report: Report) -> None:
        """Tells the choice of rows what a call came to; the calls come in order."""
        if self.step_programs.rows and read.stepping is not None:
            self.step_programs.learn(read.stepping, read.steps, report, self.time.round())


def _reported(report: Report, tops: bool, began: float) -> Given:
    """A dispatched call, whose report is on its way."""
    dispatched = Dispatched(report.numbers, began, time.perf_counter())
    report = report if tops else report._replace(tops=None)
    jax.copy_to_host_async((report.numbers, report.tops))
    return Given(dispatched, report=report)
