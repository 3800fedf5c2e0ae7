"""The engine's programs at work on one state: calls of steps are dispatched, and not waited for.

To dispatch a program of many small kernels takes the host about as long as the device takes to
compute it, and almost none of that is Python. So a thread beside the engine's dispatches. This file
knows requests with their slots and tables, and no queue; `prompt_passes` has what comes before.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jflash.pair import Models, Params
from jflash.serving.calls.first_runs import run_once
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.packing import Report
from jflash.serving.calls.programs import Programs, compile_programs
from jflash.serving.calls.slots import empty_state
from jflash.serving.calls.some_slots import Stepping, slot_counts
from jflash.serving.calls.step_programs import StepPrograms
from jflash.serving.paging.copies import Copies
from jflash.serving.thread.device_time import DeviceTime, Dispatched, UnderWay
from jflash.serving.thread.forms import Forms
from jflash.serving.thread.in_order import InOrder
from jflash.serving.thread.job import Given, Job, Read


class Device:
    """The state and the programs of one layout; used by one thread.

    What a thread of its own does touches the state, and nothing of a request that may change.
    """

    def __init__(self, models: Models, params: Params, layout: Layout) -> None:
        self.models, self.params, self.layout = models, params, layout  # settled
        self.programs: Programs = compile_programs(models, params, layout)
        self.counts = slot_counts(models, layout)
        self.step_programs = StepPrograms(models, params, layout, self.programs)
        if len(self.counts) > 1:  # a warm-up by requests would not reach all
            run_once(models, params, layout, self.programs)
        self.state = empty_state(models, layout)
        self.copies = Copies(models, layout)
        self.time = DeviceTime()
        self._work = InOrder("jflash-device")
        self.forms = Forms(models, layout)

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

        return self._called(jobs, stepping, self.dispatch(work), self.layout.steps)

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

        looked = self.dispatch(look)
        masks = forms.masks(ready, slots)

        def work() -> Given:
            began, seen = looked.result()
            self.state, forms.drafted, drafts, report = programs.decide(
                self.params, self.state, table, slots, who, forms.drafted, seen, masks
            )
            drafts.copy_to_host_async()
            return _reported(report, tops, began)._replace(drafts=drafts)

        stepping = Stepping(count, count * self.models.block_size)
        read = self._called(ready, stepping, self.dispatch(work), 1)
        forms.follows(jobs, slots, read.given)
        return read

    def dispatch[T](self, work: Callable[[], T]) -> Future[T]:
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


def ask_for(*arrays: jax.Array | None) -> None:
    """Has arrays copied to the host's memory in which they do not lie."""
    for array in arrays:
        if array is not None and array.sharding.memory_kind != "pinned_host":
            array.copy_to_host_async()


def _reported(report: Report, tops: bool, began: float) -> Given:
    """A dispatched call, whose report is on its way."""
    dispatched = Dispatched(report.numbers, began, time.perf_counter())
    report = report if tops else report._replace(tops=None)
    ask_for(report.numbers, report.tops)
    return Given(dispatched, report=report)
