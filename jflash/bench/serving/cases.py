"""The cases of the serving table: engines of a size, compiled several at a time, timed one by one.

A random pair of a published shape replays a recorded pair's acceptances; a real pair answers
questions.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from jflash.bench.serving.recording import Recording
from jflash.bench.serving.replay import replaying
from jflash.bench.serving.speed import (
    NEW,
    PROMPT,
    RandomPrompts,
    burst,
    first_tokens,
    median_of,
    running,
)
from jflash.bench.serving.stalls import beside_long, stalled
from jflash.bench.shapes import model_shape
from jflash.compiled.shape import PREFILL_CHUNK, Shape
from jflash.devices.backends import with_backends
from jflash.devices.distribute import place
from jflash.devices.mesh import for_batch, over, tensor_mesh, with_context, with_rounding
from jflash.generate import Pair
from jflash.io import default_dtype
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import random_weights
from jflash.pair import Models, Params
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.pass_sizes import engine_chunk
from jflash.serving.calls.programs import compile_programs
from jflash.serving.collection import only_of_new_objects
from jflash.serving.engine import PREFILL_BETWEEN, Engine
from jflash.serving.request import Request
from pallas_kernels.block_attention import PAGE

LONG = 2048  # new tokens of those that decode while a first token is waited for


class Case(NamedTuple):
    """An engine of so many slots and steps a call, and the lines of the table that it gives."""

    slots: int
    steps: int
    rows: str | None = None  # AUTO (jflash.records.kernels): as many as pay
    burst: bool = True  # requests that come at once, whose acceptances are forced
    first: bool = False  # first tokens: in an empty engine, beside all other slots, again
    long: int = 0  # tokens of a prompt that comes while all other slots decode
    chunk: int = PREFILL_CHUNK  # tokens of a prompt that one pass computes at most

    @property
    def layout(self) -> Layout:
        if self.long:
            return beside_long(self.slots, self.long, self.steps, self.chunk)
        context = PROMPT + (LONG if self.first else NEW)
        return layout_of(self.slots, context, self.steps, chunk=self.chunk)


def random_pair(
    shape: str,
    recording: Recording,
    dtype: str | None,
    drafter_dtype: str = "",
    batch: int | None = None,
    shared: tuple[int, str] = (1, "columns"),
) -> Pair:
    """A published shape with random weights that replays the recording.

    `drafter_dtype` and `batch`: see `Models.drafting_in`. `shared`: how many devices share it, and
    what they share of experts.
    """
    target, drafter = model_shape(shape)
    models = Models(Target(target), Drafter(drafter), drafter.block_size)
    models = over(models, tensor_mesh(shared[0]), shared[1]).drafting_in(drafter_dtype, batch)
    models = with_backends(models, dtype or default_dtype(), jax.devices()[0])
    models = for_batch(replaying(models, recording), batch)
    weights = Params(*random_weights(models.configs, place=partial(place, models.mesh)))
    params = with_rounding(models, with_context(models, weights))
    return Pair(models, jax.block_until_ready(params))


def engine_for(pair: Pair, layout: Layout, queue: int, between: int = PREFILL_BETWEEN) -> Engine:
    """An engine of this layout, for greedy requests."""
    shape = layout.shape
    return Engine(
        pair, max_batch=shape.batch, max_context=shape.capacity, pages=layout.pages,
        max_queue=queue, max_stop_ids=shape.stop_slots, steps_per_call=layout.steps,
        prefill_chunk=shape.chunk, prefill_between=between, kinds=layout.kinds,
    )  # fmt: skip


def pair_layout(models: Models, slots: int, context: int, steps: int, stops: int) -> Layout:
    """`layout_of` whose passes are those of an engine that is told nothing of them."""
    chunk = engine_chunk(models, -(-context // PAGE) * PAGE)
    return layout_of(slots, context, steps, stops, chunk)


def layout_of(
    slots: int, context: int, steps: int, stops: int = 0, chunk: int = PREFILL_CHUNK
) -> Layout:
    columns = -(-context // PAGE)
    shape = Shape.of(slots, columns * PAGE, stops, chunk)
    return Layout(shape, None, steps, ("greedy",))


def warm(wanted: Sequence[tuple[Pair, Layout]]) -> None:
    """Compiles everything, several programs at a time."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        compiled = lambda each: compile_programs(each[0].models, each[0].params, each[1])  # noqa: E731
        list(pool.map(compiled, wanted))


def measured(
    pair: Pair,
    cases: Sequence[Case],
    wait: Callable[[], None],
    *,
    requests: Sequence[int],
    texts: Sequence[int],
    repeats: int,
    probes: int,
    between: int,
) -> Iterator[dict[str, Any]]:
    """A row for each case; all are compiled before `wait` is called, and timed after it.

    There is a burst of each of `requests` for each slot, and one of each of `texts` in all where
    there are more slots. Between two calls of steps at most
    `between` tokens of prompts are computed.
    """
    pairs = [replace(pair, models=replace(pair.models, rows=case.rows)) for case in cases]
    warm([(own, case.layout) for own, case in zip(pairs, cases, strict=True)])
    wait()
    prompts = RandomPrompts(pair.models.target.config.vocab_size)
    for own, case in zip(pairs, cases, strict=True):
        row = {"batch": case.slots, "rows": case.rows, "steps_per_call": case.steps}
        row |= {"prefill_chunk": case.chunk, "prefill_between": between}
        queue = (max(requests) + 1) * case.slots
        with engine_for(own, case.layout, queue, between) as engine, only_of_new_objects():
            if case.long:
                yield (
                    {"what": "long prompt"}
                    | row
                    | stalled(engine, case.slots - 1, prompts, case.long)
                )
                continue
            for each in requests if case.burst else ():
                found = forced(engine, case.slots, each * case.slots, prompts, repeats)
                yield {"what": "forced"} | row | found
            for count in texts if case.burst else ():
                if count < case.slots:
                    found = forced(engine, case.slots, count, prompts, repeats)
                    yield {"what": "few texts"} | row | found
            if case.first:
                found = waited_for(engine, case.slots, prompts, probes)
                yield {"what": "first token"} | row | found


def forced(
    engine: Engine, slots: int, count: int, prompts: RandomPrompts, repeats: int
) -> dict[str, Any]:
    """`count` requests, which come at once: from their prompts to their last tokens."""

    def once(new: int) -> dict[str, Any]:
        fresh = prompts.take(count)
        return burst(engine, [Request(prompt_ids=ids, max_tokens=new) for ids in fresh], slots)

    once(2 * engine.pair.models.block_size)  # warms up
    return median_of(repeats, lambda: once(NEW))


def waited_for(engine: Engine, slots: int, prompts: RandomPrompts, probes: int) -> dict[str, Any]:
    """Times to the first token: in an empty engine, of known prompts, and with one slot free."""
    first_tokens(engine, prompts, 2)
    row = {
        "empty": first_tokens(engine, prompts, probes),
        "known": first_tokens(engine, prompts, probes, again=True),
        "running": slots - 1,
    }
    with running(engine, prompts, slots - 1):
        row["beside"] = first_tokens(engine, prompts, probes)
    return row
