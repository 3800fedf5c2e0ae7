"""The engine: requests come at any time from any thread, and one thread owns the device.

Each request's greedy text is the text it has alone. Knows token ids only.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jflash.generate import Pair, check_request
from jflash.programs import (
    PREFILL_CHUNK,
    Shape,
    capacity_for,
    make_request,
    new_state,
)
from jflash.row_choice import programs_for
from jflash.serving.handle import Handle
from jflash.serving.request import KEYS, Event, Failed, FinishReason, Full, Request, Result


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What the engine does now and has done since it began."""

    waiting: int
    running: int
    prompt_tokens: int
    new_tokens: int
    drafted: int
    accepted: int
    ended: dict[FinishReason, int]


class Engine:
    """Decodes what is submitted, at most `max_batch` requests at once, until `close`.

    A request may have `max_context` tokens, its new ones included: the models' positions unless
    given. More than `max_queue` that wait are refused. The programs are compiled before the
    constructor returns. Usable as a context manager.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_batch: int = 8,
        max_context: int | None = None,
        max_queue: int = 1024,
        max_stop_ids: int = 16,
        steps_per_call: int = 4,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        limits = [c.max_position_embeddings for c in pair.models.configs]
        self.max_context = min(limits) if max_context is None else max_context
        for name, value in (
            ("max_batch", max_batch),
            ("max_context", self.max_context),
            ("max_queue", max_queue),
            ("steps_per_call", steps_per_call),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_context > min(limits):
            raise ValueError(
                f"max_context {max_context} passes the model's {min(limits)} positions"
            )
        # Greedy requests and drawn ones share the program, so that none compiles anew.
        self.pair = Pair(replace(pair.models, sampled=True), pair.params)
        width = self.pair.models.block_size
        capacity = capacity_for(self.max_context, 0, width, prefill_chunk)
        self._shape = Shape.of(max_batch, capacity, max_stop_ids, prefill_chunk)
        self._steps = steps_per_call
        self._max_queue = max_queue
        self._programs = programs_for(self.pair.models, self.pair.params, self._shape)
        self._lock = threading.Condition(threading.RLock())
        self._waiting = deque[tuple[Handle, float | None]]()
        self._running = dict[int, tuple[Handle, float | None]]()
        self._cancelled = set[Handle]()
        self._counts = {"prompt_tokens": 0, "new_tokens": 0, "drafted": 0, "accepted": 0}
        self._ended: dict[FinishReason, int] = {}
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name="jflash-engine", daemon=True)
        self._thread.start()

    def check(self, request: Request) -> None:
        """ValueError, naming the field and its value, for what this engine can never serve."""
        check_request(self.pair.models, request.prompt_ids, request.decoding)
        total = len(request.prompt_ids) + request.max_tokens
        if total > self.max_context:
            raise ValueError(
                f"{len(request.prompt_ids)} prompt tokens + max_tokens {request.max_tokens} pass "
                f"the engine's {self.max_context}: give fewer"
            )
        if len(request.stop_ids) > self._shape.stop_slots:
            raise ValueError(
                f"{len(request.stop_ids)} stop_ids: at most {self._shape.stop_slots} fit"
            )

    def submit(self, request: Request) -> Handle:
        """Queues a request. ValueError as `check`; Full, Failed; RuntimeError once closed."""
        self.check(request)
        handle = Handle(request, self._cancel)
        timeout = request.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._error is not None:
                raise Failed("the engine has failed") from self._error
            if self._closing:
                raise RuntimeError("the engine is closed")
            if len(self._waiting) >= self._max_queue:
                raise Full(f"{self._max_queue} requests wait")
            self._waiting.append((handle, deadline))
            self._lock.notify()
        return handle

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """The results of many requests, in their order; waits for them."""
        return [handle.result() for handle in [self.submit(r) for r in requests]]

    def stats(self) -> Stats:
        """A snapshot."""
        with self._lock:
            return Stats(
                waiting=len(self._waiting),
                running=len(self._running),
                ended=dict(self._ended),
                **self._counts,
            )

    def close(self) -> None:
        """Cancels what is left and ends the thread; again, nothing."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cancel(self, handle: Handle) -> None:
        with self._lock:
            self._cancelled.add(handle)
            self._lock.notify()

    def _guarded(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            with self._lock:
                self._error = error
                left = [handle for handle, _ in (*self._running.values(), *self._waiting)]
                self._waiting.clear()
            for handle in left:
                failure = Failed("the engine has failed")
                failure.__cause__ = error
                handle.fail(failure)

    def _loop(self) -> None:
        state = new_state(self.pair.models, self._shape)
        nobody = np.zeros(self._shape.batch, bool)
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._running or self._closing)
                leave = self._leaving()
                for b, reason in leave.items():
                    self._give(self._running.pop(b)[0], [Event((), finish_reason=reason)])
                if self._closing:
                    return
                begun = self._admitted()
            for b, handle in begun:
                state = self._programs.prefill(
                    self.pair.params, state, jnp.int32(b), self._row(handle.request)
                )
            if begun:
                self._hand_out(state.sequences, dict(begun))
            cancel = nobody.copy()
            cancel[list(leave)] = True
            state, report = self._programs.run(
                self.pair.params, state, jnp.int32(self._steps), jnp.asarray(cancel)
            )
            self._hand_out(report, {b: handle for b, (handle, _) in self._running.items()})

    def _leaving(self) -> dict[int, FinishReason]:
        """Slots of requests that end before their time; those that wait end here."""
        now = time.monotonic()

        def why(handle: Handle, deadline: float | None) -> FinishReason | None:
            if self._closing or handle in self._cancelled:
                return "cancelled"
            return "timeout" if deadline is not None and now >= deadline else None

        for handle, deadline in list(self._waiting):
            if reason := why(handle, deadline):
                self._waiting.remove((handle, deadline))
                self._give(handle, [Event((), finish_reason=reason)])
        leaving = dict[int, FinishReason]()
        for b, running in self._running.items():
            if reason := why(*running):
                leaving[b] = reason
        self._cancelled.clear()
        return leaving

    def _admitted(self) -> list[tuple[int, Handle]]:
        """Waiting requests put into free slots, the smallest priority first."""
        begun = []
        for b in range(self._shape.batch):
            if b not in self._running and self._waiting:
                chosen = min(self._waiting, key=lambda entry: entry[0].request.priority)
                self._waiting.remove(chosen)
                self._running[b] = chosen
                self._counts["prompt_tokens"] += len(chosen[0].request.prompt_ids)
                begun.append((b, chosen[0]))
        return begun

    def _row(self, request: Request):
        seed = secrets.randbelow(KEYS) if request.seed is None else request.seed
        key = jax.random.fold_in(jax.random.key(seed), request.index)
        accept = self.pair.models.max_accept
        return make_request(self._shape, request.prompt_ids, request.decoding, accept, key)

    def _hand_out(self, report, slots: dict[int, Handle]) -> None:
        """The events of every step since the last look."""
        tokens, length, done, steps, lengths = (
            np.asarray(getattr(report, name))
            for name in ("tokens", "length", "done", "steps", "acceptance_lengths")
        )
        for b, handle in slots.items():
            request, prompt = handle.request, len(handle.request.prompt_ids)
            ids = tokens[b, prompt : length[b]].tolist()
            ends = np.cumsum([1, *lengths[b, : steps[b]]]).tolist()
            starts = [0, *ends]
            events = [
                Event(tuple(ids[s:e]), self._drafted(request, s), max(e - s - 1, 0))
                for s, e in zip(starts, ends, strict=False)
                if e > handle.tokens
            ]
            if done[b]:
                reason: FinishReason = "stop" if ids[-1] in request.stop_ids else "length"
                events[-1] = events[-1]._replace(finish_reason=reason)
                del self._running[b]
            self._give(handle, events)

    def _drafted(self, request: Request, tokens: int) -> int:
        """Drafts that the step after so many new tokens verified: those there was room for."""
        if not tokens or not request.speculate:
            return 0
        return min(self.pair.models.max_accept, request.max_tokens - tokens)

    def _give(self, handle: Handle, events: list[Event]) -> None:
        with self._lock:
            for event in events:
                self._counts["new_tokens"] += len(event.token_ids)
                self._counts["drafted"] += event.drafted
                self._counts["accepted"] += event.accepted
                if event.finish_reason:
                    ended = self._ended.get(event.finish_reason, 0)
                    self._ended[event.finish_reason] = ended + 1
        if events:
            handle.give(events)
