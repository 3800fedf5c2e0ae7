"""The two executables behind every driver, `prefill` and `run`, and the arrays that go in.

A shape is (models, batch, capacity, chunk, stop slots). Within it prompt lengths, limits, stop
sets, seeds and bounds are run-time values, so nothing compiles twice.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash.cache import empty_cache, with_rings
from jflash.decoding import GREEDY, Sampling
from jflash.prefill import Request, prefill
from jflash.sampling import filters_of
from jflash.speculative import Models, Params, State, speculative_step

STOP_SLOTS = 16  # stop ids are padded to a multiple of this


class Shape(NamedTuple):
    """The static sizes of a program; two requests with equal shapes share their executables."""

    batch: int
    capacity: int
    chunk: int
    stop_slots: int
    dtype: str


class Report(NamedTuple):
    """What the host reads after a call: copies, never the donated state."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    done: Bool[Array, " B"]
    steps: Int[Array, " B"]
    acceptance_lengths: Int[Array, "B S"]


class Programs(NamedTuple):
    """Executables of one shape and the seconds it took to compile them.

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


def run(
    models: Models,
    params: Params,
    state: State,
    max_steps: Int[Array, ""],
    cancel: Bool[Array, " B"],
) -> tuple[State, Report]:
    """Steps until every sequence is done, or `max_steps` (a run-time value) of them.

    `cancel` ends sequences before the first step: how the host applies a stop that it found.
    """
    state = state._replace(done=state.done | cancel)

    def unfinished(carry):
        step, state = carry
        return (step < max_steps) & ~jnp.all(state.done)

    def body(carry):
        step, state = carry
        return step + 1, speculative_step(models, params, state)

    _, state = lax.while_loop(unfinished, body, (jnp.int32(0), state))
    return state, Report(
        state.tokens, state.length, state.done, state.steps, state.acceptance_lengths
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def new_state(models: Models, shape: Shape) -> State:
    """A state of empty slots, all done: they idle until a prompt is admitted."""

    def caches(config):
        sizes = (shape.batch, shape.capacity, config.num_kv_heads, config.head_dim)
        return empty_cache(config.num_layers, *sizes, shape.dtype)

    drafter_cache = ()
    if models.drafter is not None:
        config = models.drafter.config
        drafter_cache = with_rings(caches(config), config.windows, models.block_size)
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    return State(
        tokens=ints((shape.batch, shape.capacity)),
        length=jnp.ones(shape.batch, jnp.int32),
        limit=jnp.ones(shape.batch, jnp.int32),
        stops=jnp.full((shape.batch, shape.stop_slots), -1, jnp.int32),
        done=jnp.ones(shape.batch, bool),
        max_accept=ints(shape.batch),
        keys=jax.random.split(jax.random.key(0), shape.batch),
        filters=jax.tree.map(lambda x: jnp.full(shape.batch, x), filters_of(GREEDY)),
        steps=ints(shape.batch),
        acceptance_lengths=ints((shape.batch, shape.capacity)),
        target_cache=caches(models.target.config),
        drafter_cache=drafter_cache,
    )


def make_request(
    shape: Shape,
    prompt: Sequence[int],
    max_new_tokens: int,
    stops: Sequence[int],
    max_accept: int,
    key: Array,
    sampling: Sampling = GREEDY,
) -> Request:
    """A request's arrays, padded on the host: no length of anything reaches the compiler."""
    tokens = np.zeros(shape.capacity, np.int32)
    tokens[: len(prompt)] = prompt
    padded_stops = np.full(shape.stop_slots, -1, np.int32)
    padded_stops[: len(stops)] = stops
    return Request(
        prompt=jnp.asarray(tokens),
        prompt_length=jnp.int32(len(prompt)),
        limit=jnp.int32(len(prompt) + max_new_tokens),
        stops=jnp.asarray(padded_stops),
        max_accept=jnp.int32(max_accept),
        key=key,
        filters=filters_of(sampling),
    )


def compile_programs(models: Models, params: Params, shape: Shape) -> Programs:
    """Both executables of a shape; asked again, the same ones without compiling."""
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.typeof(x), params))
    return _compile(models, tuple(leaves), tree, shape)


@functools.lru_cache(maxsize=64)
def _compile(models: Models, leaves: tuple, tree: Any, shape: Shape) -> Programs:
    params = jax.tree.unflatten(tree, leaves)
    start = time.perf_counter()
    state = jax.eval_shape(lambda: new_state(models, shape))
    key = jax.random.key(0)
    request = jax.eval_shape(lambda: make_request(shape, [0], 1, (), 0, key))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    cancel = jax.ShapeDtypeStruct((shape.batch,), jnp.bool_)
    prefill_jit = jax.jit(functools.partial(prefill, models, shape.chunk), donate_argnums=1)
    run_jit = jax.jit(functools.partial(run, models), donate_argnums=1)
    return Programs(
        prefill_jit.lower(params, state, number, request).compile(),
        run_jit.lower(params, state, number, cancel).compile(),
        time.perf_counter() - start,
    )
