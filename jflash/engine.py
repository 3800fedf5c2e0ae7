"""Many jobs through few compiled shapes: a slot that becomes free is given the next job at once.

The device loop runs a bounded number of steps a call, as a run-time value; between two calls the
host looks which sequences ended and prefills others into their slots. A job's tokens depend on
neither slot nor neighbours nor order. Knows token ids only.
"""

import itertools
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.decoding import GREEDY, Sampling
from jflash.generate import (
    PREFILL_CHUNK,
    Generation,
    Pair,
    Seconds,
    check_keys,
    check_request,
    generation_of,
    models_for,
)
from jflash.prefill import Request
from jflash.programs import (
    STOP_SLOTS,
    Programs,
    Report,
    Shape,
    capacity_for,
    compile_programs,
    make_request,
    new_state,
)
from jflash.speculative import Models, State

STEPS_PER_CALL = 8  # more leave finished slots idle for longer, fewer let the device wait
FILLS = 8  # a bucket of fewer fills of the batch is not worth its compilation and its last lull


class Job(NamedTuple):
    """One sequence to decode; `index` (32 bits) names it and, with the seed, makes its key."""

    index: int
    prompt_ids: list[int]
    sampling: Sampling = GREEDY
    max_new_tokens: int = 256


class Bucket(NamedTuple):
    """Jobs that share a compiled shape, the longest expected first."""

    capacity: int
    jobs: list[Job]


@dataclass(kw_only=True)
class _Clock:
    """Seconds that no answer has carried away yet."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    def take(self) -> Seconds:
        taken = Seconds(compile=self.compile, prefill=self.prefill, decode=self.decode)
        self.compile = self.prefill = self.decode = 0.0
        return taken


class _Way(NamedTuple):
    """What all jobs of a call share."""

    models: Models
    params: Any
    stops: tuple[int, ...]
    key: jax.Array
    max_accept: int
    steps: int


def serve(
    pair: Pair,
    jobs: Sequence[Job],
    *,
    batch_size: int,
    stop_token_ids: Sequence[int] = (),
    seed: int = 0,
    steps_per_call: int = STEPS_PER_CALL,
    capacity: int | None = None,
    oracle: bool = False,
    answered: Collection[int] = (),
    room_for_width: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[tuple[Job, Generation]]:
    """Answers as they finish, each job with the tokens that `generate` gives it alone.

    A job draws from the key of `seed` and its index, as sequence `first_index` of `generate`.
    Jobs are grouped by capacity (see `buckets`) unless one `capacity` is given for all; within a
    group nothing compiles anew. Those whose index is in `answered` count in the grouping and are
    not run: what is left of an interrupted run meets the same shapes. `room_for_width` groups as
    a pair of that block width would.

    The `seconds` of an answer are those spent since the answer before it, by all slots together:
    over all answers they add up to the whole. What the caller does with an answer overlaps with the
    device. ValueError at the call, before anything runs, for jobs that the models cannot serve.
    """
    check_keys(seed, (job.index for job in jobs), prefill_chunk)
    _check(pair, jobs, batch_size, steps_per_call, stop_token_ids)
    models = models_for(pair.models, [job.sampling for job in jobs])
    stops = tuple(stop_token_ids)
    plan = buckets(
        jobs,
        batch_size=batch_size,
        block_size=max(models.block_size, room_for_width or 1),
        capacity=capacity,
        prefill_chunk=prefill_chunk,
    )
    way = _Way(
        models=models,
        params=pair.params,
        stops=stops,
        key=jax.random.key(seed),
        max_accept=0 if oracle or models.drafter is None else models.block_size - 1,
        steps=steps_per_call,
    )
    shape = Shape(
        batch=batch_size,
        capacity=0,
        chunk=prefill_chunk,
        stop_slots=max(1, -(-len(stops) // STOP_SLOTS)) * STOP_SLOTS,
        dtype=str(pair.params.target["embedding"].dtype),
    )
    return _serve_all(way, shape, plan, frozenset(answered))


def buckets(
    jobs: Sequence[Job],
    *,
    batch_size: int,
    block_size: int,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[Bucket]:
    """Jobs by the cache slots that they need, so that short ones do not pay for the longest.

    The largest capacity comes first. Few jobs (under FILLS × batch_size) join the next larger
    capacity. When the largest of all has few, it takes in the next smaller one, unless that would
    more than double what those jobs need.
    """
    need = {
        job.index: capacity_for(len(job.prompt_ids), job.max_new_tokens, block_size, prefill_chunk)
        for job in jobs
    }
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
    """What may take longest starts first: the fewer slots idle at the end."""
    return sorted(jobs, key=lambda job: (-job.max_new_tokens, -len(job.prompt_ids), job.index))


def _check(
    pair: Pair, jobs: Sequence[Job], batch_size: int, steps: int, stops: Sequence[int]
) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if steps < 1:
        raise ValueError(f"steps_per_call must be at least 1, got {steps}")
    if len({job.index for job in jobs}) < len(jobs):
        raise ValueError("two jobs have the same index: it names a job and makes its key")
    for job in jobs:
        try:
            check_request(pair.models, job.prompt_ids, job.max_new_tokens, stops)
        except ValueError as error:
            raise ValueError(f"job {job.index}: {error}") from None


def _serve_all(
    way: _Way, shape: Shape, plan: list[Bucket], answered: frozenset[int]
) -> Iterator[tuple[Job, Generation]]:
    for bucket in plan:
        jobs = [job for job in bucket.jobs if job.index not in answered]
        if jobs:
            yield from _serve_bucket(way, shape._replace(capacity=bucket.capacity), jobs)


def _serve_bucket(way: _Way, shape: Shape, jobs: Sequence[Job]) -> Iterator[tuple[Job, Generation]]:
    """The loop: refill, run, hand out what ended before while the device runs, look."""
    clock = _Clock()
    programs, state = _compiled(way, shape, clock)
    bound, nobody = jnp.int32(way.steps), jnp.zeros(shape.batch, bool)
    slots = [jnp.int32(b) for b in range(shape.batch)]
    coming = _requests(way, shape, jobs)
    ready = deque(itertools.islice(coming, shape.batch))
    running, ended = dict[int, Job](), dict[int, Job]()
    report: Report | None = None
    while True:
        begin = time.perf_counter()
        for b in range(shape.batch):
            if b not in running and ready:
                running[b], request = ready.popleft()
                state = programs.prefill(way.params, state, slots[b], request)
        jax.block_until_ready(state.length)
        clock.prefill += time.perf_counter() - begin
        begin = time.perf_counter()
        if running:
            state, upcoming = programs.run(way.params, state, bound, nobody)
        if report is not None:
            yield from _answers(report, ended, way.stops, clock)
        if not running:
            return
        ready.extend(itertools.islice(coming, shape.batch - len(ready)))
        # Only these bytes stand between two calls: tokens are read while the next one runs.
        done = np.asarray(upcoming.done)
        clock.decode += time.perf_counter() - begin
        report, ended = upcoming, {b: running.pop(b) for b in list(running) if done[b]}


def _compiled(way: _Way, shape: Shape, clock: _Clock) -> tuple[Programs, State]:
    begin = time.perf_counter()
    programs = compile_programs(way.models, way.params, shape)
    state = jax.block_until_ready(new_state(way.models, shape))
    clock.compile += time.perf_counter() - begin
    return programs, state


def _requests(way: _Way, shape: Shape, jobs: Sequence[Job]) -> Iterator[tuple[Job, Request]]:
    """Jobs with their arrays on the device, made as they are asked for: while the device runs."""
    for job in jobs:
        key = jax.random.fold_in(way.key, job.index)
        request = make_request(
            shape, job.prompt_ids, job.max_new_tokens, way.stops, way.max_accept, key,
            job.sampling,
        )  # fmt: skip
        yield job, request


def _answers(
    report: Report, ended: dict[int, Job], stops: Sequence[int], clock: _Clock
) -> Iterator[tuple[Job, Generation]]:
    """The results of the slots that ended, one read of the device for all of them."""
    if ended:
        report = jax.device_get(report)
    for b, job in ended.items():
        yield job, generation_of(report, b, len(job.prompt_ids), stops, None, clock.take())
