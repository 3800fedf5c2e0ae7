"""Times the shared step, `programs.run`, at a chosen context: plain, verify, draft, whole.

All caches hold random numbers and the weights are real or random, never zeros: a chip runs faster
on zeros, and reads fewer experts of rows that are not finite. No draft is accepted, so every step
commits one token a sequence and all stay level.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jflash.compiled.shape import Shape, new_state
from jflash.layers.cache import DeltaCache, LayerState
from jflash.layers.experts import ROUTING
from jflash.layers.passes import Block
from jflash.pair import Models, Params
from jflash.speculative import block_positions, draft
from jflash.state import State
from pallas_kernels.gated_delta import CHUNK, Rows


class Window(NamedTuple):
    """The timed steps: `steps` of them from committed length `start`, `repeats` times."""

    start: int
    steps: int
    repeats: int

    @property
    def context(self) -> float:
        """Mean number of tokens before the newest one over the timed steps."""
        return self.start - 1 + (self.steps - 1) / 2


def window_around(context: int, capacity: int, width: int, steps: int, repeats: int) -> Window:
    """Steps centred on `context`, or as close below as the capacity lets the last block fit."""
    start = min(context + 1 - (steps - 1) // 2, capacity - steps - width)
    if start < 1:
        raise ValueError(
            f"{steps} steps at context {context} do not fit capacity {capacity}: "
            "take fewer steps, a longer context or a larger capacity"
        )
    return Window(start, steps, repeats)


def busy_state(models: Models, shape: Shape, window: Window, empty: State | None = None) -> State:
    """Sequences in the middle of a text: random tokens, caches full of random numbers, no stops.

    `empty` is the state before, by default one of slots.
    """
    state = new_state(models, shape) if empty is None else empty
    size, vocab_size = state.sequences.tokens.shape, models.target.config.vocab_size
    tokens = jax.random.randint(jax.random.key(1), size, 0, vocab_size, jnp.int32)
    tokens = jax.device_put(tokens, state.sequences.tokens.sharding)
    caches, tree = jax.tree.flatten((state.target_cache, state.drafter_cache))
    keys = jax.random.split(jax.random.key(2), len(caches))
    caches = [_filled(cache, key) for cache, key in zip(caches, keys, strict=True)]
    target_cache, drafter_cache = jax.tree.unflatten(tree, caches)
    target_cache = tuple(_with_fading_rows(cache) for cache in target_cache)
    sequences = state.sequences._replace(tokens=tokens)
    state = state._replace(
        sequences=sequences, target_cache=target_cache, drafter_cache=drafter_cache
    )
    return rewound(jax.block_until_ready(state), window)


def _filled(x: Array, key: Array) -> Array:
    """Where the array lies: devices that share it draw a part each."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.jit(_normal, donate_argnums=0, out_shardings=x.sharding)(x, key)


def _normal(x: Array, key: Array) -> Array:
    return jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)


def _with_fading_rows(cache: LayerState) -> LayerState:
    """A delta net's rows as a model makes them: others grow its state until it is not finite."""
    if not isinstance(cache, DeltaCache):
        return cache
    memory = cache.memory
    where = jax.tree.map(lambda x: x.sharding, memory.rows)
    rows = jax.jit(_fading, donate_argnums=0, out_shardings=where)(memory.rows)
    return cache._replace(memory=memory._replace(rows=rows))


def _fading(rows: Rows) -> Rows:
    """Out of normal numbers: keys of length 1, and a state that loses some 8 % a token."""
    k, v, g, beta = rows
    length = jnp.linalg.norm(k, axis=-1, keepdims=True)
    return Rows(k / length, v, -0.1 * jnp.abs(g), jax.nn.sigmoid(beta))


def rewound(state: State, window: Window) -> State:
    """The state back at the window's start, as far from its limit as the capacity allows."""
    state = state._replace(target_cache=tuple(_based(x, window) for x in state.target_cache))
    batch, capacity = state.sequences.tokens.shape
    again = dict(
        length=jnp.full(batch, window.start, jnp.int32),
        limit=jnp.full(batch, capacity, jnp.int32),
        done=jnp.zeros(batch, bool),
        max_accept=jnp.zeros(batch, jnp.int32),
        steps=jnp.zeros(batch, jnp.int32),
    )
    # On every device that has the sequences, so that no timed call moves them there.
    return state.with_sequences(**jax.device_put(again, state.sequences.tokens.sharding))


def _based(cache: LayerState, window: Window) -> LayerState:
    """A delta net's memory from the border before the last step's first row, where it left it.

    From another one the next step would go over as many rows as lie between, or over none.
    """
    if not isinstance(cache, DeltaCache):
        return cache
    last = max(window.start - 2, 0)  # the newest token but one
    base = jnp.full(cache.memory.base.shape, last // CHUNK * CHUNK, jnp.int32)
    base = jax.device_put(base, cache.memory.base.sharding)
    return cache._replace(memory=cache.memory._replace(base=base))


def experts_read(
    models: Models, params: Params, state: State, routed: Callable[..., Any] | None = None
) -> float | None:
    """The number of experts that the next step's block reaches, the mean over the sparse layers.

    The step reads the weights of these experts. None without experts. `routed` is `routes` of these
    models, compiled; without it each operation runs by itself, because compiling a large model once
    more would take a minute.
    """
    if not models.target.config.experts:
        return None
    found = routed(params, state) if routed else routes(models, params, state)
    layers = jax.tree.leaves(found)
    return sum(len(jnp.unique(ids)) for ids in layers) / len(layers)


def routes(models: Models, params: Params, state: State) -> Any:
    """The experts of every token of the next step's block, by layer. The state stays as it is."""
    proposal, _ = draft(models, params, state)
    positions, widths = block_positions(models, state)
    anchor = jnp.take_along_axis(state.sequences.tokens, positions[:, :1], axis=1)
    _, found = models.target.apply(
        {"params": params.target}, jnp.concatenate([anchor, proposal.tokens], axis=1), positions,
        state.target_cache, Block(positions[:, 0], widths, models.kernels),
        models.taps, mutable=[ROUTING],
    )  # fmt: skip
    return found[ROUTING]


def time_run(
    compiled: Any, params: Params, state: State, window: Window
) -> tuple[list[float], State]:
    """Seconds a step of each repeat, and the state again (the given one is donated).

    One call of the executable runs all steps of a repeat.
    """
    steps, none = jnp.int32(window.steps), jnp.zeros(state.sequences.done.shape, bool)

    def call(state: State) -> tuple[State, Array]:
        state, report = compiled(params, state, steps, none)
        return state, report.steps

    seconds, state, counts = _timed(call, state, window)
    for ran in jax.device_get(counts):
        assert (ran == window.steps).all(), f"{ran} steps ran, not {window.steps}"
    return seconds, state


def time_draft(
    models: Models, params: Params, state: State, window: Window
) -> tuple[list[float], State]:
    """Seconds of `speculative.draft` in a device loop that holds nothing else."""

    def loop(params: Params, state: State, steps: Array) -> tuple[State, Array]:
        def body(_, carry):
            state, total = carry
            proposal, state = draft(models, params, state)
            # The text grows, so that the compiler cannot hoist the draft out of the loop.
            longer = state.with_sequences(length=state.sequences.length + 1)
            return longer, total + proposal.tokens.sum()

        return lax.fori_loop(0, steps, body, (state, jnp.int32(0)))

    jitted: Callable = jax.jit(loop, donate_argnums=1)
    steps = jnp.int32(window.steps)
    seconds, state, _ = _timed(lambda state: jitted(params, state, steps), state, window)
    return seconds, state


def _timed(
    call: Callable[[State], tuple[State, Array]], state: State, window: Window
) -> tuple[list[float], State, list[Array]]:
    """Seconds a step of each repeat of `call`, the state, and the results; the first warms up."""
    seconds, results = [], []
    for _ in range(window.repeats + 1):
        state = jax.block_until_ready(rewound(state, window))
        begin = time.perf_counter()
        state, result = call(state)
        results.append(jax.block_until_ready(result))
        seconds.append((time.perf_counter() - begin) / window.steps)
    return seconds[1:], state, results
