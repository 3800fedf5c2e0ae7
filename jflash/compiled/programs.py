"""The two executables of every driver, `prefill` and `run`: what they do, and their compilation.

They are those of a pair of models and a shape (`shape`), in which all that differs from request to
request is a run-time value, so nothing compiles twice.
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
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash.compiled.shape import Shape, chunk_sizes, make_request, new_state, state_specs
from jflash.compiled.stored import compiling
from jflash.compiled.tiles import settled
from jflash.devices.mesh import EVERYWHERE, local, param_specs, spread
from jflash.pair import Models, Params
from jflash.prefill import prefill
from jflash.records.decoding import Decoding
from jflash.records.kernels import AUTO
from jflash.rows import Survey
from jflash.speculative import speculative_step
from jflash.state import State

_POOL = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2))  # that compiles; it traces nothing


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
