"""What the engine keeps on its device: slots, and pools of pages of which every call brings tables.

Nothing here computes a token.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jflash.compiled.shape import chunk_sizes, empty_sequences
from jflash.devices.mesh import EVERYWHERE, local, shared, specs
from jflash.devices.places import landing_places, place_specs
from jflash.layers.cache import DeltaCache, LayerCache, PagedCache, RingCache, WindowCache
from jflash.pair import Models
from jflash.rows import empty_survey
from jflash.serving.calls.layout import Layout, settled, windows
from jflash.serving.request import BIASED, MOST
from jflash.state import State
from jflash.tokens.logprobs import unasked
from jflash.tokens.shaping import unshaped
from pallas_kernels.block_attention import PAGE

CACHES = ("target_cache", "drafter_cache")  # of a State


def empty_state(models: Models, layout: Layout) -> State:
    """A state with empty slots and pages of zeros; it is there on all devices that share the
    models, so that none writes where nothing is yet."""
    return jax.block_until_ready(_made_state(models, settled(models, layout)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _made_state(models: Models, layout: Layout) -> State:
    make = functools.partial(_empty_state, local(models), layout)
    return shared(models.mesh, make, (), state_specs(models, layout))()


def state_specs(models: Models, layout: Layout) -> Any:
    """Where a state's arrays lie: devices share the pools, and all have the sequences."""
    if models.mesh is None:
        return EVERYWHERE
    layout = settled(models, layout)
    bare = lambda models: _empty_state(models, layout)._replace(places=None)  # noqa: E731
    return specs(models, bare)._replace(places=place_specs(models))


def _empty_state(models: Models, layout: Layout) -> State:
    shape = layout.shape._replace(batch=layout.slots)

    def paged(layer):
        if not isinstance(layer, LayerCache | RingCache):
            return layer
        kind = PagedCache
        count = layout.page_count
        if isinstance(layer, RingCache):
            assert window is not None, "a ring is of a window"
            kind, count = WindowCache, window.pages
        k, v = (jnp.zeros((count, PAGE, *x.shape[2:]), x.dtype) for x in (layer.k, layer.v))
        return kind(k, v, None)

    window = sliding(models, layout)
    rows = max(models.block_size, chunk_sizes(models, shape)[-1])
    sizes = (shape.batch, PAGE, rows, models.dtype)
    both = (models.target, models.drafter)
    target, drafter = (
        () if model is None else tuple(map(paged, model.empty_states(*sizes))) for model in both
    )
    survey = None if models.rows is None else empty_survey()
    sequences = empty_sequences(shape)._replace(
        shaping=unshaped(shape.batch, BIASED),
        logprobs=unasked(shape.batch, places_of(models, layout), most_of(models)),
        best_drafts=jnp.zeros(shape.batch, bool),
    )
    return State(sequences, target, drafter, survey, landing_places(models))


def places_of(models: Models, layout: Layout) -> int:
    """The tokens that a slot may get in a call."""
    return models.block_size * layout.steps


def most_of(models: Models) -> int:
    """The most probable tokens that a request may ask for."""
    return min(MOST, models.target.config.vocab_size)


class Window(NamedTuple):
    """The pools of the layers with windows: the largest window, and their pages in all."""

    size: int
    pages: int


def sliding(models: Models, layout: Layout) -> Window | None:
    """Room for what the slots see of the past, compute and may commit ahead, and as much again for
    prefixes; None without windows. The slots' need is always met."""
    sizes = windows(models)
    if not sizes:
        return None
    layout = settled(models, layout)
    shape, ahead = layout.shape, 3 * layout.steps * models.block_size
    most = chunk_sizes(models, shape)[-1]
    one = -(-(max(sizes) + max(most, ahead)) // PAGE) + 2
    return Window(max(sizes), layout.slots * min(2 * one, layout.columns))


def table_columns(models: Models, layout: Layout) -> int:
    """The columns of a call's table; the second half is of the layers with windows."""
    return layout.columns * (1 if sliding(models, layout) is None else 2)


def own_array(table: Int[Array, "B _"]) -> Int[Array, "B _"]:
    """The table in an array of the program's own, for two reasons.

    An argument's address is another one in each call, and would be written into every layer's node
    of a graph again. And XLA gives a kernel a slice where it lies in another array if the slice is
    a multiple of 256 bytes long, but Mosaic's kernels need one that begins at such a multiple.
    """
    return jnp.maximum(table, 0)  # no page has a lower number, which XLA cannot know


def with_table(
    state: State, table: Int[Array, "B _"] | None, slots: Int[Array, " B"] | None = None
) -> State:
    """The state with its table of pages in every layer that has pages, and the slots of its rows in
    recurrent layers. As many rows as slots lie in the slots' order (see `some_slots.places`)."""
    layers = (*state.target_cache, *state.drafter_cache)
    halves = [table] * 2
    if table is not None and any(isinstance(layer, WindowCache) for layer in layers):
        halves = jnp.split(table, 2, axis=1)
    full, window = (None if half is None else own_array(half) for half in halves)

    def one(layer):
        if isinstance(layer, WindowCache):
            return layer._replace(table=window)
        if isinstance(layer, DeltaCache):
            some = slots is not None and len(slots) < len(layer.memory.base)
            return layer._replace(slots=slots if some else None)
        return layer._replace(table=full) if isinstance(layer, PagedCache) else layer

    caches = {name: tuple(map(one, getattr(state, name))) for name in CACHES}
    return state._replace(**caches)
