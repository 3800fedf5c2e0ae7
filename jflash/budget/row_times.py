"""The times of a step by the rows that it verifies, on this device: measured once and kept.

They are those of a device that does nothing else, in the middle of texts.
"""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jflash.budget.rounds import Step
from jflash.compiled.shape import Shape, new_state
from jflash.pair import Models, Params
from jflash.state import State
from jflash.system.device import device_name
from jflash.system.files import write_json

TURNS, TIMED_CALLS, TIMED_STEPS = 6, 4, 4
TIMED_CONTEXT = 1024  # tokens of each sequence at most: few texts fill a large capacity


def step_times(
    models: Models, params: Params, shape: Shape, runs: Mapping[int, Any]
) -> dict[int, Step]:
    """The times of a step by its rows; see `timed`."""
    state, no_cancel = new_state(models, shape), jnp.zeros(shape.batch, bool)
    steps = jnp.int32(TIMED_STEPS)
    return timed(
        runs, shape, TIMED_STEPS, with_texts(models, state),
        lambda run, state: run(params, state, steps, no_cancel),
    )  # fmt: skip


def with_texts(models: Models, state: State) -> State:
    """The state with random tokens in all sequences, and noise in the drafter's context: equal rows
    would read the same experts, and a drafter that sees nothing drafts the same token everywhere.
    """
    sizes, vocabulary = state.sequences.tokens.shape, models.target.config.vocab_size
    tokens = jax.random.randint(jax.random.key(0), sizes, 0, vocabulary, jnp.int32)
    state = state.with_sequences(tokens=tokens)
    return state._replace(drafter_cache=jax.tree.map(_noise, state.drafter_cache))


def _noise(leaf: jax.Array) -> jax.Array:
    """Normal numbers in its place and memory."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    # Of one function, so that leaves of one shape share a program: there are two a layer.
    return jax.jit(_normal, donate_argnums=0, out_shardings=leaf.sharding)(leaf)


def _normal(x: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(1), x.shape, x.dtype)


def timed(
    runs: Mapping[int, Any],
    shape: Shape,
    steps: int,
    state: State,
    call: Callable[[Any, State], tuple[State, Any]],
) -> dict[int, Step]:
    """The times of a step of each run, by its rows; a call has `steps` and takes the state.

    All sequences are live, in the middle of a text. The next call is dispatched while one runs, as
    decoding does it: where the host is slower than the device, that is what a step takes. The runs
    take turns, and the fastest turn of each counts: so no pause of the host falls on one of them.
    """
    batch, capacity = shape.batch, shape.capacity
    best = dict.fromkeys(runs, Step(math.inf, math.inf))
    for _ in range(TURNS):
        for rows, run in runs.items():
            # No draft is accepted, so a step is a token.
            state = state.with_sequences(
                length=jnp.full(batch, min(capacity // 2, TIMED_CONTEXT), jnp.int32),
                limit=jnp.full(batch, capacity, jnp.int32),
                done=jnp.zeros(batch, bool),
            )
            jax.block_until_ready(state)
            state, report = call(run, state)
            ends, dispatch = [], math.inf
            for _ in range(TIMED_CALLS):
                begin = time.perf_counter()
                state, upcoming = call(run, state)
                dispatch = min(dispatch, time.perf_counter() - begin)
                jax.block_until_ready(report)
                ends.append(time.perf_counter())
                report = upcoming
            jax.block_until_ready(report)
            took = (time.perf_counter() - ends[0]) / TIMED_CALLS
            found = Step(1000 * took / steps, 1000 * dispatch / steps)
            best[rows] = Step(*map(min, best[rows], found))
    return best


_TIMES: dict[str, dict[int, Step]] = {}


def kept_times(
    models: Models,
    shape: Any,
    counts: Sequence[int],
    measure: Callable[[], dict[int, Step]],
    folder: Path | None,
) -> dict[int, Step]:
    """The times of `counts` of rows on this device, from this process or from `folder`.

    Without them it measures, and keeps the result in both.
    """
    sizes = models, shape, tuple(counts), TIMED_CALLS, Step._fields
    named = repr((*sizes, device_name(), jax.__version__))
    name = hashlib.sha256(named.encode()).hexdigest()[:24]
    if name not in _TIMES:
        file = folder / f"row-times-{name}.json" if folder else None
        kept = _read(file) if file else None
        _TIMES[name] = kept or measure()
        if file and not kept:
            with contextlib.suppress(OSError):  # then the next process measures again
                write_json(file, _TIMES[name])
    return _TIMES[name]


def _read(file: Path) -> dict[int, Step] | None:
    try:
        kept = json.loads(file.read_text()).items()
        return {int(rows): Step(*map(float, times)) for rows, times in kept}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
