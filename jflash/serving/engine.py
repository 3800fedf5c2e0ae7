"""The engine: requests come at any time from any thread, and one thread decides what runs.

Where the law of one arithmetic holds, a request's greedy text does not depend on what else runs, is
cancelled, is preempted or was cached. This file knows only token ids.
"""

import secrets
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jflash.checks import check_chunk
from jflash.compiled.shape import Shape
from jflash.generate import Pair, check_pair
from jflash.memory import used_memory
from jflash.serving.calls.layout import KINDS, Kind, Layout, refusal_of_some, settled, steps_of_call
from jflash.serving.calls.pass_sizes import burst_of, engine_chunk
from jflash.serving.grammar import Matcher
from jflash.serving.handle import Handle, results_of
from jflash.serving.limits import (
    check,
    check_sizes,
    checked_ahead,
    checked_counts,
    checked_kinds,
)
from jflash.serving.paging.room import check_room
from jflash.serving.paging.states import states_kept
from jflash.serving.request import KEYS, Request, Result
from jflash.serving.stats import Stats
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from jflash.serving.thread.work import Work
from jflash.serving.weights import replacing, replacing_drafter
from jflash.system.device import device_memory
from pallas_kernels.block_attention import PAGE

# Tokens of prompts between two calls, as long as STALL allows. With 512 a burst fills its slots
# more slowly than they empty: at 8B's sizes and batch 32 / 64 that gave 6,222 / 5,027 tokens/s, and
# 6,698 / 6,630 with 2,048 (one H200, jax 0.11.2, 2026-11-24).
PREFILL_BETWEEN = 2048
STALL = 0.045  # seconds that prompts keep a text waiting at most, if a chunk is no longer


class Engine:
    """Decodes submitted requests, at most `max_batch` at once, until `close`, or until nobody holds
    it nor a handle of it.

    A request may have `max_context` tokens, its new ones included: the models' positions unless
    given. Keys, values and context lie in `pages` of PAGE tokens, which all requests share: enough
    for the longest in every slot unless given. When they are short, the last request gives its
    pages back, and is computed again later. For prefixes `states` copies of the recurrent states of
    a slot are kept, where layers have such: one for each slot unless given, 4 at least. At most
    `max_queue` requests wait for a slot; more are refused. Between two calls of steps at most
    `prefill_between` tokens of prompts are computed, in whole chunks, of one prompt 512 or a chunk,
    and none that would pass STALL, so that a long prompt keeps no text waiting. A pass computes the
    ends of at most `prompts_at_once` prompts: of several where that pays, unless given. A call
    serves `max_batch` requests, or the fewest of `slots_at_once` that have a place for each that
    steps: some that pay unless given. The prompts of `prompts_ahead` more requests are computed
    before a text has ended: of as many as pay unless given. The constructor compiles the programs,
    only those of `kinds` of requests: 'greedy' ones need no more than the argmax of the unchanged
    logits. The engine is a context manager.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_batch: int = 8,
        max_context: int | None = None,
        pages: int | None = None,
        states: int | None = None,
        max_queue: int = 1024,
        max_stop_ids: int = 16,
        steps_per_call: int | None = None,
        prefill_chunk: int | None = None,
        prefill_between: int = PREFILL_BETWEEN,
        prompts_at_once: int | None = None,
        slots_at_once: Iterable[int] | None = None,
        prompts_ahead: int | None = None,
        kinds: tuple[Kind, ...] = KINDS,
    ) -> None:
        check_pair(pair)
        positions = min(c.max_position_embeddings for c in pair.models.configs)
        self.max_context = positions if max_context is None else max_context
        check_sizes(
            max_batch=max_batch, max_context=self.max_context, pages=pages, max_queue=max_queue,
            steps_per_call=steps_per_call, prefill_chunk=prefill_chunk,
            prefill_between=prefill_between, prompts_at_once=prompts_at_once,
        )  # fmt: skip
        check_sizes(0, max_stop_ids=max_stop_ids, states=states)
        kinds, columns = checked_kinds(kinds), -(-self.max_context // PAGE)
        if prefill_chunk is None:
            prefill_chunk = engine_chunk(pair.models, columns * PAGE)
        if self.max_context > positions:
            raise ValueError(f"max_context {max_context} passes the model's {positions} positions")
        check_chunk(pair.models, prefill_chunk)
        refusal = refusal_of_some(pair.models)
        if refusal and (prompts_at_once or 1) > 1:
            raise ValueError(f"prompts_at_once {prompts_at_once}: {refusal}")
        counts = checked_counts(slots_at_once, max_batch, refusal)
        ahead = checked_ahead(prompts_ahead, refusal)
        states = states_kept(pair.models, max_batch, states)
        rows = pair.models.rows
        if isinstance(rows, int) and rows < max_batch:
            raise ValueError(f"{rows} rows to verify for {max_batch} requests: each needs one")
        self.pair, self.max_batch = pair, max_batch
        shape = Shape.of(max_batch, columns * PAGE, max_stop_ids, prefill_chunk)
        steps = steps_of_call(pair.models, steps_per_call)
        layout = Layout(shape, pages, steps, kinds, states, prompts_at_once, counts, ahead)
        self._layout = settled(pair.models, layout)
        if (prompts_at_once or 1) > self._layout.slots:
            slots = f"there are {self._layout.slots} slots"
            raise ValueError(f"prompts_at_once {prompts_at_once}: {slots}")
        check_room(pair.models, self._layout, device_memory())
        burst, salt = burst_of(pair.models, shape, prefill_between), pair.models.dtype.encode()
        self._loop = Loop(pair.models, pair.params, self._layout, salt, burst, STALL)
        self._work = Work(self._loop, max_queue)
        # The thread holds no engine, so one that nobody closes frees its memory once it is dropped.
        weakref.finalize(self, self._work.tell_to_end).atexit = False

    def check(self, request: Request) -> None:
        """ValueError, naming the field and its value, for what this engine can never serve."""
        check(request, self.pair.models, self._layout, self.max_context)

    def submit(self, request: Request) -> Handle:
        """Queues a request. ValueError as `check`; Full, Failed; RuntimeError once closed.

        The first request with a grammar compiles the programs for all of them, in this thread.
        """
        self.check(request)
        if request.grammar is not None:
            self._loop.device.prepare_grammars()
        # Who holds a handle holds its engine.
        handle = Handle(request, lambda _: self._work.cancel(job))
        now, seed = time.monotonic(), request.seed
        job: Job

        def make(number: int) -> Job:
            nonlocal job
            job = Job(
                handle=handle,
                order=(request.priority, number),
                seed=secrets.randbelow(KEYS) if seed is None else seed,
                deadline=None if request.timeout is None else now + request.timeout,
                tokens=list(request.prompt_ids),
                submitted=now,
                matcher=request.grammar and Matcher(request.grammar),
            )
            return job

        self._work.add(make)
        return handle

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Submits the requests as the queue has room, waits, and returns their results in order.

        An error, such as that of one that is refused, cancels the others.
        """
        return results_of(requests, self.submit, self.wait_for_room)

    @property
    def room(self) -> int:
        """How many more requests `submit` would queue now. Failed; RuntimeError once closed."""
        return self._work.room

    def wait_for_room(self) -> None:
        """Until `submit` would not raise Full, though another thread may come first."""
        self._work.wait_for_room()

    def stats(self) -> Stats:
        """A snapshot."""
        pages = self._loop.holdings.pages
        with self._work.changed:
            return Stats(
                waiting=self._work.waiting(),
                running=min(len(self._loop.running), self.max_batch),
                pages=pages.count,
                pages_available=pages.available,
                pages_kept=pages.kept,
                ended=dict(self._work.ended),
                steps_by_rows=self._loop.device.step_programs.steps_by_rows(),
                rounds_by_tokens=tuple(self._loop.rounds_by_tokens),
                device_bytes=used_memory(),
                **self._loop.counts._asdict(),
            )

    def before_waiting(self, do: Callable[[], None]) -> None:
        """Has the engine's thread call `do` in every round, once the device has its next work and
        after first tokens and ends, and when nothing is left to do or all has failed: good times to
        hand events on. The engine fails if `do` does."""
        self._loop.before_waiting = do

    def update_weights(self, *, target: Any = None, drafter: Any = None) -> int:
        """Replaces a model's parameters; returns the number of the new version.

        Running requests first finish with the old ones, waiting requests begin with the new ones.
        Nothing is compiled, but for a first drafter's what makes its context kernel of its layers'.
        JAX's arrays are not copied: no later program may take their memory.
        ValueError, naming the leaf, unless tree, shapes and dtypes are the same, and arrays that
        several devices share lie on them in the same parts.

        A new target forgets all prefixes. After a new drafter alone, requests with `speculate`
        false still find them; others compute theirs again, because the drafter's context is made
        of the target's features, which no page keeps.
        """
        models, old, new = self._loop.device.models, self._loop.device.params, dict[str, Any]()
        if target is not None:
            new["target"] = replacing(old.target, target, "target")
        if drafter is not None:
            new["drafter"] = replacing_drafter(models, old.drafter, drafter)
        if not new:
            raise ValueError("no new parameters: give a target, a drafter, or both")

        def update() -> int:
            self._loop.new_weights(self._loop.device.params._replace(**new))
            return self._loop.version

        return self._work.between(update)

    def sleep(self) -> None:
        """Frees the pages' memory once running requests have finished; others wait for `wake`."""
        self._work.between(self._loop.sleep)

    def wake(self) -> None:
        """Allocates the pages again, empty, after `sleep`."""
        self._work.between(self._loop.wake)

    def close(self) -> None:
        """Cancels all requests and ends the thread, which is not waited for in what it calls back;
        a second call does nothing."""
        self._work.end()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
