"""Many jobs through few compiled shapes: a slot that becomes free is given the next job at once.

The device loop runs a bounded number of steps a call, as a run-time value. Between two calls the
host prefills other jobs into the slots of sequences that ended. A job's tokens depend neither on
its slot nor on its neighbours nor on the order. This file knows only token ids.
"""

import itertools
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.decoding import Decoding
from jflash.generate import (
    DEFAULTS,
    Generation,
    Pair,
    Seconds,
    check_keys,
    check_request,
    generation_of,
    models_for,
)
from jflash.programs import (
    PREFILL_CHUNK,
    Programs,
    Report,
    Shape,
    capacity_for,
    make_request,
    new_state,
)
from jflash.row_choice import ChosenRows, programs_for
from jflash.speculative import Models, Sequences, State

STEPS_PER_CALL = 8  # more leave finished slots idle for longer, fewer let the device wait
FILLS = 8  # a bucket of fewer fills of the batch is not worth its compilation and its last lull


class Job(NamedTuple):
    """One sequence to decode; `index` (32 bits) names it and, with the seed, makes its key."""

    index: int
    prompt_ids: list[int]
    decoding: Decoding = DEFAULTS

    def capacity(self, block_size: int, chunk: int) -> int:
        """The cache slots that it needs."""
        return capacity_for(len(self.prompt_ids), self.decoding.max_new_tokens, block_size, chunk)


class Bucket(NamedTuple):
    """Jobs that share a compiled shape, the longest expected first."""

    capacity: int
    jobs: list[Job]


@dataclass(kw_only=True)
class _Clock:
    """Seconds that belong to no answer yet."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    def take(self) -> Seconds:
        taken = Seconds(compile=self.compile, prefill=self.prefill, decode=self.decode)
        self.compile = self.prefill = self.decode = 0.0
        return taken


class _Shared(NamedTuple):
    """What all jobs of a call share."""

    models: Models
    params: Any
    steps: int


def serve(
    pair: Pair,
    jobs: Sequence[Job],
    *,
    batch_size: int,
    steps_per_call: int = STEPS_PER_CALL,
    capacity: int | None = None,
    answered: Collection[int] = (),
    room_for_width: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    **options: Any,
) -> Iterator[tuple[Job, Generation]]:
    """Yields answers as they finish, each job with the tokens that `generate` gives for it.

    `options` replace fields of every job's decoding, as those of `generate` do.
    A job draws from the key of its seed and its index, as sequence `first_index` of `generate`.
    Jobs are grouped by capacity (see `buckets`) unless one `capacity` is given for all; within a
    group nothing compiles again. Jobs whose index is in `answered` count in the grouping and do not
    run, so the rest of an interrupted run gets the same shapes. `room_for_width` groups as a pair
    of that block width would.

    The `seconds` of an answer are those spent since the answer before it, by all slots together:
    over all answers they add up to the whole. What the caller does with an answer overlaps with the
    device. ValueError at the call, before anything runs, for jobs that the models cannot serve.
    """
    if options:
        jobs = [job._replace(decoding=replace(job.decoding, **options)) for job in jobs]
    for seed in {job.decoding.seed for job in jobs}:
        check_keys(seed, (job.index for job in jobs), prefill_chunk)
    _check(pair, jobs, batch_size, steps_per_call)
    models = models_for(pair.models, [job.decoding for job in jobs])
    plan = buckets(
        jobs,
        batch_size=batch_size,
        block_size=max(models.block_size, room_for_width or 1),
        capacity=capacity,
        prefill_chunk=prefill_chunk,
    )
    stops = max((len(job.decoding.stop_token_ids) for job in jobs), default=0)
    shape = Shape.of(batch_size, 0, stops, prefill_chunk)
    return _serve_all(
        _Shared(models, pair.params, steps_per_call), shape, plan, frozenset(answered)
    )


def buckets(
    jobs: Sequence[Job],
    *,
    batch_size: int,
    block_size: int,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[Bucket]:
    """Jobs by the cache slots that they need, so that short jobs do not take a long one's slots.

    The largest capacity comes first. Few jobs (under FILLS × batch_size) join the next larger
    capacity. When the largest of all has few, it takes in the next smaller one, unless that would
    more than double what those jobs need.
    """
    need = {job.index: job.capacity(block_size, prefill_chunk) for job in jobs}
    if capacity is not None and jobs:
        longest = max(need.values())
        if capacity < longest:
            raise ValueError(f"capacity {capacity} is below the {longest} slots that a job needs")
        return [Bucket(capacity, _longest_first(jobs))]
    enough = FILLS * batch_size
    groups: list[tuple[int, list[Job]]] = []  # from the smallest capacity up
    for slots in sorted(set(need.values())):
        own = [job for job in jobs if need[job.index] == slots]
        if groups and len(groups[-1][1]) < enough:
            own += groups.pop()[1]
        groups.append((slots, own))
    if len(groups) > 1 and len(groups[-1][1]) < enough and groups[-1][0] <= 2 * groups[-2][0]:
        slots, own = groups.pop()
        groups[-1] = (slots, own + groups[-1][1])
    return [Bucket(slots, _longest_first(own)) for slots, own in reversed(groups)]


def _longest_first(jobs: Iterable[Job]) -> list[Job]:
    """Jobs that may take longest start first, so that fewer slots idle at the end."""
    return sorted(jobs, key=_expected)


def _expected(job: Job) -> tuple[int, int, int]:
    return -job.decoding.max_new_tokens, -len(job.prompt_ids), job.index


def _check(pair: Pair, jobs: Sequence[Job], batch_size: int, steps: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if steps < 1:
        raise ValueError(f"steps_per_call must be at least 1, got {steps}")
    if len({job.index for job in jobs}) < len(jobs):
        raise ValueError("two jobs have the same index: it names a job and makes its key")
    for job in jobs:
        try:
            check_request(pair.models, job.prompt_ids, job.decoding)
            if job.decoding.stop_when is not None:
                raise ValueError("stop_when is for generate and stream: jobs end by stop tokens")
        except ValueError as error:
            raise ValueError(f"job {job.index}: {error}") from None


def _serve_all(
    shared: _Shared, shape: Shape, plan: list[Bucket], answered: frozenset[int]
) -> Iterator[tuple[Job, Generation]]:
    for bucket in plan:
        jobs = [job for job in bucket.jobs if job.index not in answered]
        if jobs:
            yield from _serve_bucket(shared, shape._replace(capacity=bucket.capacity), jobs)


def _serve_bucket(
    shared: _Shared, shape: Shape, jobs: Sequence[Job]
) -> Iterator[tuple[Job, Generation]]:
    """The loop: refill, run, yield earlier answers while the device runs, read which ended."""
    clock = _Clock()
    programs, state = _compiled(shared, shape, clock)
    bound, nobody = jnp.int32(shared.steps), jnp.zeros(shape.batch, bool)
    slots = [jnp.int32(b) for b in range(shape.batch)]
    coming = _requests(shared, shape, jobs)
    ready = deque(itertools.islice(coming, shape.batch))
    running, ended = dict[int, Job](), dict[int, Job]()
    report: Report | None = None
    while True:
        begin = time.perf_counter()
        for b in range(shape.batch):
            if b not in running and ready:
                running[b], request = ready.popleft()
                state = programs.prefill(shared.params, state, slots[b], request)
        jax.block_until_ready(state.sequences.length)
        clock.prefill += time.perf_counter() - begin
        begin = time.perf_counter()
        if running:
            state, upcoming = programs.run(shared.params, state, bound, nobody)
        if report is not None:
            yield from _answers(report, ended, clock)
        if not running:
            return
        ready.extend(itertools.islice(coming, shape.batch - len(ready)))
        # Only these bytes are read between two calls: tokens are read while the next call runs.
        done = np.asarray(upcoming.done)
        clock.decode += time.perf_counter() - begin
        report, ended = upcoming, {b: running.pop(b) for b in list(running) if done[b]}


def _compiled(shared: _Shared, shape: Shape, clock: _Clock) -> tuple[Programs | ChosenRows, State]:
    begin = time.perf_counter()
    programs = programs_for(shared.models, shared.params, shape)
    state = jax.block_until_ready(new_state(shared.models, shape))
    clock.compile += time.perf_counter() - begin
    return programs, state


def _requests(
    shared: _Shared, shape: Shape, jobs: Sequence[Job]
) -> Iterator[tuple[Job, Sequences]]:
    """Jobs with their arrays, which are put on the device one by one while it runs."""
    for job in jobs:
        key = jax.random.fold_in(jax.random.key(job.decoding.seed), job.index)
        accept = shared.models.max_accept
        yield job, make_request(shape, job.prompt_ids, job.decoding, accept, key)


def _answers(
    report: Report, ended: dict[int, Job], clock: _Clock
) -> Iterator[tuple[Job, Generation]]:
    """The results of the slots that ended, by one read of the device."""
    if ended:
        report = jax.device_get(report)
    for b, job in ended.items():
        prompt_tokens = len(job.prompt_ids)
        yield job, generation_of(report, b, prompt_tokens, job.decoding, None, clock.take())
