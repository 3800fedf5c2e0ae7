"""Many known jobs through one engine: answers as they end, with the seconds they took.

A job's tokens depend neither on its neighbours nor on the order. This file knows only token ids.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from jflash.checks import check_keys, check_request
from jflash.compiled.shape import Shape, capacity_for
from jflash.generate import DEFAULTS, Generation, Pair, Seconds
from jflash.pair import Models
from jflash.records.decoding import Decoding
from jflash.serving.calls.layout import Kind, Layout, steps_of_call
from jflash.serving.calls.pass_sizes import engine_chunk
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle
from jflash.serving.paging.room import check_room
from jflash.serving.request import Request, Result
from jflash.system.device import device_memory
from pallas_kernels.block_attention import PAGE


class Job(NamedTuple):
    """One sequence to decode; `index` (32 bits) names it and, with the seed, makes its key."""

    index: int
    prompt_ids: list[int]
    decoding: Decoding = DEFAULTS

    @property
    def tokens(self) -> int:
        """The most that its text may have."""
        return len(self.prompt_ids) + self.decoding.max_new_tokens


def serve(
    pair: Pair,
    jobs: Sequence[Job],
    *,
    batch_size: int,
    steps_per_call: int | None = None,
    context: int | None = None,
    answered: Collection[int] = (),
    prefill_chunk: int | None = None,
    **options: Any,
) -> Iterator[tuple[Job, Generation]]:
    """Yields answers as they end, each job with the tokens that `generate` gives for it.

    `options` replace fields of every job's decoding, as those of `generate` do.
    A job draws from the key of its seed and its index, as sequence `first_index` of `generate`.
    Jobs that may become longest begin first, so that fewer slots idle at the end. Those whose index
    is in `answered` do not run, but count in the shapes, so that the rest of an interrupted run is
    computed as the whole. There is room for `context` tokens of a text, as many as the longest
    needs unless given.

    The `seconds` of an answer are those between the end of the answer before it and its end, by all
    slots together: over all answers they add up to the whole. What the caller does with an answer
    overlaps with the device. ValueError at the call, before anything runs, for jobs that the models
    cannot serve.
    """
    if options:
        jobs = [job._replace(decoding=replace(job.decoding, **options)) for job in jobs]
    _check(pair, jobs, batch_size, steps_per_call)
    longest = max((job.tokens for job in jobs), default=1)
    if context is not None and context < longest:
        raise ValueError(f"context {context} is below the {longest} tokens that a job needs")
    layout = layout_for(pair.models, jobs, batch_size, context, steps_per_call, prefill_chunk)
    for seed in {job.decoding.seed for job in jobs}:
        check_keys(seed, (job.index for job in jobs), layout.shape.chunk)
    todo = [job for job in sorted(jobs, key=_expected) if job.index not in answered]
    return _served(pair, layout, todo) if todo else iter(())


def layout_for(
    models: Models,
    jobs: Sequence[Job],
    batch_size: int,
    context: int | None = None,
    steps_per_call: int | None = None,
    prefill_chunk: int | None = None,
) -> Layout:
    """The static sizes of a run: pages for `batch_size` texts of `context` tokens.

    A context is rounded up to one of a few, so that other jobs find compiled programs. A pass
    computes as much of a prompt as an engine's does unless `prefill_chunk` says how much.
    """
    longest = max((job.tokens for job in jobs), default=1)
    positions = min(config.max_position_embeddings for config in models.configs)
    columns = -(-min(capacity_for(context or longest, 0, 0, PAGE), positions) // PAGE)
    stops = max((len(job.decoding.stop_token_ids) for job in jobs), default=0)
    chunk = engine_chunk(models, columns * PAGE) if prefill_chunk is None else prefill_chunk
    shape = Shape.of(batch_size, columns * PAGE, stops, chunk)
    steps = steps_of_call(models, steps_per_call)
    return Layout(shape, None, steps, _kinds(models, jobs))


def check_batch(
    models: Models, prompts: Sequence[Sequence[int]], decoding: Decoding, batch_size: int
) -> None:
    """ValueError, before weights are read, for a prompt that the models cannot serve, by its place,
    and for more texts at once than any memory holds."""
    jobs = [Job(i, list(prompt), decoding) for i, prompt in enumerate(prompts)]
    for job in jobs:
        try:
            check_request(models, job.prompt_ids, decoding)
        except ValueError as error:
            raise ValueError(f"problem {job.index}: {error}") from None
    check_room(models, layout_for(models, jobs, batch_size), device_memory())


def _kinds(models: Models, jobs: Sequence[Job]) -> tuple[Kind, ...]:
    """One program for all jobs: so a text does not depend on its neighbours by any kernels."""
    draws = any(job.decoding.sampling.temperature > 0 for job in jobs)
    return ("drawn",) if models.sampled or draws else ("greedy",)


def _expected(job: Job) -> tuple[int, int, int]:
    return -job.decoding.max_new_tokens, -len(job.prompt_ids), job.index


def _check(pair: Pair, jobs: Sequence[Job], batch_size: int, steps: int | None) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if steps is not None and steps < 1:
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


def _request(job: Job, models: Models) -> Request:
    decoding = job.decoding
    return Request(
        prompt_ids=job.prompt_ids,
        max_tokens=decoding.max_new_tokens,
        stop_ids=decoding.stop_token_ids,
        sampling=decoding.sampling,
        seed=decoding.seed,
        index=job.index,
        speculate=not decoding.oracle,
        draft_rule=models.draft_rule,
        # Without the law a cached prefix may have other bits, and which are cached is chance.
        cache_salt="" if models.one_arithmetic else str(job.index),
    )


def _served(pair: Pair, layout: Layout, jobs: Sequence[Job]) -> Iterator[tuple[Job, Generation]]:
    """Submits all jobs, and yields each when its end was counted in the engine's thread."""
    ends = SimpleQueue[tuple[Job, Handle, Seconds]]()
    begin, shape = time.perf_counter(), layout.shape
    positions = min(config.max_position_embeddings for config in pair.models.configs)
    with Engine(
        pair, max_batch=shape.batch, max_context=min(shape.capacity, positions),
        max_queue=len(jobs), max_stop_ids=shape.stop_slots, steps_per_call=layout.steps,
        prefill_chunk=shape.chunk, kinds=layout.kinds, states=layout.states,
    ) as engine:  # fmt: skip
        spent = _Spent(engine, time.perf_counter() - begin)
        for job in jobs:
            handle = engine.submit(_request(job, pair.models))
            handle.at_end(lambda job=job, handle=handle: ends.put((job, handle, spent.take())))
        for _ in jobs:
            job, handle, seconds = ends.get()
            yield job, _generation(handle.result(), seconds)


class _Spent:
    """Seconds that belong to no answer yet."""

    def __init__(self, engine: Engine, compiling: float) -> None:
        self._engine, self._compiling, self._taken = engine, compiling, (0.0, 0.0)

    def take(self) -> Seconds:
        stats, before = self._engine.stats(), self._taken
        self._taken = stats.prefill_seconds, stats.decode_seconds
        prefill, decode = (now - old for now, old in zip(self._taken, before, strict=True))
        compiling, self._compiling = self._compiling, 0.0
        return Seconds(compile=compiling, prefill=prefill, decode=decode)


def _generation(result: Result, seconds: Seconds) -> Generation:
    return Generation(
        prompt_tokens=result.prompt_tokens,
        token_ids=result.token_ids,
        acceptance_lengths=result.acceptance_lengths,
        finish_reason=result.finish_reason,
        seconds=seconds,
    )
