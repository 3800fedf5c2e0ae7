"""The same run of steps over keys and values in pages, as the engine keeps them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int

from jflash.bench.steps.cases import PLACES
from jflash.compiled.programs import Report, run, run_limits
from jflash.compiled.shape import Shape
from jflash.devices.mesh import EVERYWHERE, local, param_specs, spread
from jflash.pair import Models, Params
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.slots import empty_state, sliding, state_specs, with_table
from jflash.serving.calls.steps import DRAWN
from jflash.state import State
from pallas_kernels.block_attention import PAGE


def layout_of(models: Models, shape: Shape) -> Layout:
    """As many pages as the slots have places; ValueError for layers with windows, whose pages are
    fewer."""
    layout = Layout(shape, None, steps=1, ahead=0)
    if sliding(models, layout) is not None:
        raise ValueError("layers with windows: their pages hold less than their slots")
    return layout


def empty_in_pages(models: Models, shape: Shape) -> State:
    """A state without a table; its sequences are those of greedy programs."""
    state = empty_state(models, layout_of(models, shape))
    return state.with_sequences(**dict.fromkeys(DRAWN))


def lower_run_in_pages(models: Models, params: Params, shape: Shape) -> jax.stages.Lowered:
    """`programs.run` with the table of pages between the state and `max_steps`; donates too."""
    layout = layout_of(models, shape)
    state = jax.eval_shape(functools.partial(empty_in_pages, models, shape))
    where = state_specs(models, layout)
    if models.mesh is not None:
        where = where.with_sequences(**dict.fromkeys(DRAWN))
    takes = (param_specs(models, params), where, *[EVERYWHERE] * 3)
    inner = functools.partial(_run, local(models))
    jitted = spread(models.mesh, inner, takes, (where, EVERYWHERE), donate=(1,))
    table = jax.ShapeDtypeStruct((shape.batch, layout.columns), jnp.int32)
    return jitted.lower(params, state, table, *run_limits(state))


def _run(
    models: Models,
    params: Params,
    state: State,
    table: Int[Array, "B _"],
    max_steps: Int[Array, ""],
    cancel: Bool[Array, " B"],
) -> tuple[State, Report]:
    state, report = run(models, params, with_table(state, table), max_steps, cancel)
    return with_table(state, None), report


def with_table_of(models: Models, program: Any, shape: Shape, places: str) -> Callable[..., Any]:
    """The program with a table whose pages lie one after another, or anywhere in the pool."""
    columns = shape.capacity // PAGE
    pages = np.arange(shape.batch * columns, dtype=np.int32)
    if places == PLACES[2]:
        pages = np.random.default_rng(0).permutation(pages)
    # On every device that shares the models, so that no timed call moves it there.
    where = None if models.mesh is None else NamedSharding(models.mesh, EVERYWHERE)
    table = jax.device_put(pages.reshape(shape.batch, columns), where)
    return lambda params, state, *limits: program(params, state, table, *limits)
