"""The two executables of every driver, `prefill` and `run`, and the arrays that go in.

A shape is (models, batch, capacity, chunk, stop slots). Within it prompt lengths, limits, stop
sets, seeds and bounds are run-time values, so nothing compiles twice.
"""

import functools
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash.compiled.stored import compiling
from jflash.compiled.tiles import settled
from jflash.devices.mesh import (
    EVERYWHERE,
    local,
    param_specs,
    shared,
    specs,
    spread,
)
from jflash.devices.places import landing_places, place_specs
from jflash.pair import Models, Params
from jflash.prefill import prefill
from jflash.records.decoding import GREEDY, Decoding
from jflash.records.kernels import AUTO
from jflash.rows import Survey, empty_survey
from jflash.speculative import speculative_step
from jflash.state import Sequences, State
from jflash.tokens.sampling import filters_of

PREFILL_CHUNK = 128  # tokens of a prompt that one pass computes
LARGE_CHUNK = 512  # the same of an engine, where no chunk changes a bit
STOP_SLOTS = 16  # stop ids are padded to a multiple of this
_POOL = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2))  # that compiles; it traces nothing


class Shape(NamedTuple):
    """The static sizes of a program; two requests with equal shapes share their executables."""

    batch: int
    capacity: int
    chunk: int
    stop_slots: int

    @classmethod
    def of(cls, batch: int, capacity: int, stops: int = 0, chunk: int = PREFILL_CHUNK) -> "Shape":
        """The shape that serves requests of at most `stops` stop ids each."""
        return cls(batch, capacity, chunk, max(1, -(-stops // STOP_SLOTS)) * STOP_SLOTS)


class Report(NamedTuple):
    """What the host reads after a call: copies, never the donated state."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    done: Bool[Array, " B"]
    steps: Int[Array, " B"]
    acceptance_lengths: Int[Array, "B S"]
    survey: Survey | None = None  # with Models.rows, of all steps so far


class Programs(NamedTuple):
    """Executables of one shape and the seconds that the caller waited for them.

    prefill(params, state, slot, request) -> state
    run(params, state, max_steps, cancel) -> (state, report)
    """

    prefill: Any
    run: Any
    seconds: float


def capacity_for(prompt_tokens: int, max_new_tokens: int, block_size: int, chunk: int) -> int:
    """Cache slots for a request, rounded up to a bucket (two to an octave, at least 256).

    Holds the prompt padded to whole chunks, and every row that a padded block may write.
    """
    padded = -(-prompt_tokens // chunk) * chunk
    need = max(padded, prompt_tokens + max_new_tokens + block_size)
    bucket = max(256, 1 << (need.bit_length() - 2))
    return -(-need // bucket) * bucket


def chunk_sizes(models: Models, shape: Shape) -> tuple[int, ...]:
    """Tokens of a prompt that one pass may compute, ascending: the shape's, and fewer for the rest
    of a prompt where no chunk changes a bit. A CPU gains nothing by a second size.
    """
    free = models.one_arithmetic and models.kernels.attention == "canonical"
    several = free and shape.chunk > PREFILL_CHUNK and shape.chunk % PREFILL_CHUNK == 0
    return (PREFILL_CHUNK, shape.chunk) if several else (shape.chunk,)


def run(
    models: Models,
    params: Params,
    state: State,
    max_steps: Int[Array, ""],
    cancel: Bool[Array, " B"],
) -> tuple[State, Report]:
    """Steps until every sequence is done, or `max_steps` (a run-time value) of them.

    `cancel` ends sequences before the first step: how the host applies a stop text.
    """
    state = state.with_sequences(done=state.sequences.done | cancel)

    def unfinished(carry):
        step, state = carry
        return (step < max_steps) & ~jnp.all(state.sequences.done)

    def body(carry):
        step, state = carry
        return step + 1, speculative_step(models, params, state)

    _, state = lax.while_loop(unfinished, body, (jnp.int32(0), state))
    s = state.sequences
    return state, Report(s.tokens, s.length, s.done, s.steps, s.acceptance_lengths, state.survey)


def new_state(models: Models, shape: Shape) -> State:
    """A state of empty slots, all done: they idle until a prompt is admitted.

    It is there on all devices that share the models, so that none writes where nothing is yet.
    """
    return jax.block_until_ready(_made_state(models, shape))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _made_state(models: Models, shape: Shape) -> State:
    make = functools.partial(_new_state, local(models), shape)
    return shared(models.mesh, make, (), state_specs(models))()


def state_specs(models: Models) -> Any:
    """Where the arrays of a state lie: devices share the caches, and all have the sequences."""
    if models.mesh is None:
        return EVERYWHERE
    target, drafter = specs(models, functools.partial(_caches, shape=Shape.of(1, PREFILL_CHUNK)))
    return State(EVERYWHERE, target, drafter, EVERYWHERE, place_specs(models))


def _new_state(models: Models, shape: Shape) -> State:
    survey = None if models.rows is None else empty_survey()
    caches = _caches(models, shape)
    return State(empty_sequences(shape), *caches, survey, landing_places(models))


def _caches(models: Models, shape: Shape) -> tuple[tuple, tuple]:
    """The target's and the drafter's."""
    sizes, width = (shape.batch, shape.capacity), models.block_size
    target_cache = models.target.empty_states(*sizes, target_rows(models, shape), models.dtype)
    drafter_cache = ()
    if models.drafter is not None:
        drafter_cache = models.drafter.empty_states(*sizes, width, models.dtype)
    return target_cache, drafter_cache


def target_rows(models: Models, shape: Shape) -> int:
    """Tokens at once that a ring of the target has places for.

    A prompt's chunk attends only in the target; of a drafter it only writes the context. The
    canonical attention cuts its pieces by slots: its rings are long enough never to wrap.
    """
    if models.kernels.attention == "canonical":
        return shape.capacity
    return max(models.block_size, shape.chunk)


def empty_sequences(shape: Shape) -> Sequences:
    """Sequences that hold nothing and are done."""
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    return Sequences(
        tokens=ints((shape.batch, shape.capacity)),
        length=jnp.ones(shape.batch, jnp.int32),
        limit=jnp.ones(shape.batch, jnp.int32),
        stops=jnp.full((shape.batch, shape.stop_slots), -1, jnp.int32),
        done=jnp.ones(shape.batch, bool),
        max_accept=ints(shape.batch),
        key=jax.random.split(jax.random.key(0), shape.batch),
        filters=jax.tree.map(lambda x: jnp.full(shape.batch, x), filters_of(GREEDY)),
        steps=ints(shape.batch),
        acceptance_lengths=ints((shape.batch, shape.capacity)),
    )


def make_request(
    shape: Shape, prompt: Sequence[int], decoding: Decoding, max_accept: int, key: Array
) -> Sequences:
    """One sequence's row, padded on the host: no length of anything reaches the compiler.

    An oracle accepts no draft, others at most `max_accept` in a step.
    """
    tokens = np.zeros(shape.capacity, np.int32)
    tokens[: len(prompt)] = prompt
    stops = np.full(shape.stop_slots, -1, np.int32)
    stops[: len(decoding.stop_token_ids)] = decoding.stop_token_ids
    return Sequences(
        tokens=jnp.asarray(tokens),
        length=jnp.int32(len(prompt)),
        limit=jnp.int32(len(prompt) + decoding.max_new_tokens),
        stops=jnp.asarray(stops),
        done=jnp.asarray(False),
        max_accept=jnp.int32(0 if decoding.oracle else max_accept),
        key=key,
        filters=filters_of(decoding.sampling),
        steps=jnp.int32(0),
        acceptance_lengths=jnp.zeros(shape.capacity, jnp.int32),
    )


def compile_programs(models: Models, params: Params, shape: Shape) -> Programs:
    """Both executables of a shape; a second call returns the same ones without compiling."""
    return compile_several([models], params, shape)[0]


def compile_several(each: Sequence[Models], params: Params, shape: Shape) -> list[Programs]:
    """`compile_programs` of each, which differ in the rows that a step verifies: at the same time.

    Tracing is Python, one program after the other: a program compiles while the next is traced.
    """
    begin = time.perf_counter()
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.typeof(x), params))
    stored = {str(leaf.dtype) for leaf in leaves}
    # Prompts are admitted alike whatever a step verifies.
    any_rows = [m if m.rows is None else replace(m, rows=AUTO) for m in each]
    for models in each:
        assert models.dtype in stored, f"weights of {stored} for models of {models.dtype}"
    try:
        admits = [_compiling_prefill(m, tuple(leaves), tree, shape) for m in any_rows]
        steps = [_compiling_run(m, tuple(leaves), tree, shape) for m in each]
        done = [(admit.result(), step.result()) for admit, step in zip(admits, steps, strict=True)]
    except BaseException:  # the next call compiles again
        _compiling_prefill.cache_clear()
        _compiling_run.cache_clear()
        raise
    seconds = time.perf_counter() - begin
    return [Programs(admit, step, seconds) for admit, step in done]


@functools.lru_cache(maxsize=64)
def _compiling_prefill(models: Models, leaves: tuple, tree: Any, shape: Shape) -> Future:
    params = jax.tree.unflatten(tree, leaves)
    return compiling(_POOL.submit, lower_prefill, models, params, shape)


@functools.lru_cache(maxsize=64)
def _compiling_run(models: Models, leaves: tuple, tree: Any, shape: Shape) -> Future:
    params = jax.tree.unflatten(tree, leaves)
    return compiling(_POOL.submit, _lower_run_of, models, params, shape)


def _lower_run_of(models: Models, params: Params, shape: Shape) -> Any:
    return lower_run(models, params, jax.eval_shape(lambda: new_state(models, shape)))


def compile_prefill(models: Models, params: Params, shape: Shape) -> tuple[Any, float]:
    """The executable of `prefill`, and the seconds of its compilation."""
    begin = time.perf_counter()
    lowered = settled(lambda: lower_prefill(models, params, shape))
    return lowered.compile(), time.perf_counter() - begin


def lower_prefill(models: Models, params: Params, shape: Shape) -> jax.stages.Lowered:
    """`prefill` for these models and a shape; the state is donated."""
    state = jax.eval_shape(lambda: new_state(models, shape))
    key = jax.random.key(0)
    request = jax.eval_shape(lambda: make_request(shape, [0], Decoding(), 0, key))
    where, inner = (
        state_specs(models),
        functools.partial(prefill, local(models), chunk_sizes(models, shape)),
    )
    takes = (param_specs(models, params), where, EVERYWHERE, EVERYWHERE)
    jitted = spread(models.mesh, inner, takes, where, donate=(1,))
    return jitted.lower(params, state, jax.ShapeDtypeStruct((), jnp.int32), request)


def compile_run(models: Models, params: Params, state: State) -> tuple[Any, float]:
    """The executable of `run`, and the seconds of its compilation; `state` may be abstract."""
    begin = time.perf_counter()
    lowered = settled(lambda: lower_run(models, params, state))
    return lowered.compile(), time.perf_counter() - begin


def lower_run(models: Models, params: Params, state: State) -> jax.stages.Lowered:
    """`run` for these models; the state is donated."""
    where = state_specs(models)
    takes = (param_specs(models, params), where, EVERYWHERE, EVERYWHERE)
    inner = functools.partial(run, local(models))
    jitted = spread(models.mesh, inner, takes, (where, EVERYWHERE), donate=(1,))
    return jitted.lower(params, state, *run_limits(state))


def run_limits(state: State) -> tuple[Any, Any]:
    """`max_steps` and `cancel` of a run, as abstract values."""
    cancel = jax.ShapeDtypeStruct(state.sequences.done.shape, jnp.bool_)
    return jax.ShapeDtypeStruct((), jnp.int32), cancel
