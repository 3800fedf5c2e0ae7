"""What the device computes of prompts: passes over texts in slots, and the tokens that follow them.

Each method has some work dispatched, and waits for none of it.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jflash.serving.calls.packing import FRESH, STEPS, Row, mask_words, no_pass, pass_of, row_of
from jflash.serving.calls.pass_sizes import Several, several_prompts
from jflash.serving.calls.prefill import First
from jflash.serving.grammar import fill
from jflash.serving.schedule import Pass
from jflash.serving.thread.device import Device, ask_for
from jflash.serving.thread.device_time import Dispatched, UnderWay
from jflash.serving.thread.job import Given, Job, Read


class PromptPasses:
    """Used by the thread that uses the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.several = several_prompts(device.models, device.layout)
        self._rows = dict[int, np.ndarray]()  # what each slot begins with
        self._fresh = set[int]()  # slots whose first pass comes
        self._free = jax.device_put(np.full(mask_words(device.models), -1, np.int32))

    def admit(self, job: Job) -> None:
        """Puts the states that its prefix has into its slot, and notes what the slot begins with:
        the first pass over its text brings that."""
        slot, origin, computed = job.slot, job.origin, job.computed
        assert slot is not None
        row, device = Row(slot, job.request, job.seed, job.tokens, job.bias), self.device
        self._rows[slot] = row_of(row, device.layout, device.models.max_accept)
        self._fresh.discard(slot)
        if origin is None:
            self._fresh.add(slot)
            return

        def work() -> None:
            device.state = device.copies.put(device.state, slot, origin, computed)

        device.dispatch(work)

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
        if (1, over.size) not in self.device.programs.whole:
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
        shape, past = self.device.layout.shape, self.device.layout.slots
        given += [no_pass(past + i, none, shape) for i in range(sizes[0] - len(given))]
        packed = np.concatenate(given)

        def work() -> Given:
            began = time.perf_counter()
            self.device.state, first = self.device.programs.whole[sizes](
                self.device.params, self.device.state, packed
            )
            ask_for(first.token)
            return Given(Dispatched(first.token, began, time.perf_counter()), first)

        future = self.device.dispatch(work)
        self.device.time.follows(UnderWay("prefill_seconds", math.prod(sizes), future))
        for job, over in some:
            job.computed, job.end = over.end, 0
        return [Read(future, job, last=True, index=i) for i, (job, _) in enumerate(some)]

    def keep(self, job: Job, place: int) -> None:
        """Copies its states, after a pass that ended at a border of pages."""
        slot, computed = job.slot, job.computed
        assert slot is not None
        self.device.dispatch(
            lambda: self.device.copies.keep(self.device.state, slot, place, computed)
        )

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
            self.device.state, computed = self.device.programs.chunk[size](
                self.device.params, self.device.state, given
            )
            filled, scored, first = computed.newest, None, None
            if following is not None:
                scored = self.device.programs.score[size](
                    self.device.params, computed.hidden, following
                )
                filled = scored[0]
            if choose is not None:
                first = choose(computed.newest)
                filled = first.token
            return Given(Dispatched(filled, began, time.perf_counter()), first, scored)

        future = self.device.dispatch(work)
        self.device.time.follows(UnderWay("prefill_seconds", size, future))
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
        kind = "drawn" if draws or "greedy" not in self.device.layout.kinds else "greedy"
        control = np.array([job.slot, job.end], np.int32)

        def choose(newest: Any) -> First:
            sequences, first = self.device.programs.first[kind](
                self.device.params, self.device.state.sequences, newest, control, allowed
            )
            self.device.state = self.device.state._replace(sequences=sequences)
            ask_for(first.token, first.top if tops else None)
            return first

        return choose
