"""What a step reads and writes: one key and one value array a layer, a slot for every position.

Nothing is ever freed. Slots at and past a sequence's length are garbage by definition: rollback is
a smaller length, and the next step overwrites them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int


class LayerCache(NamedTuple):
    """Keys (normed and rotated) and values of one layer."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]


def empty_cache(
    num_layers: int, batch: int, capacity: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """Caches of zeros, one a layer; every array its own, so that all of them can be donated."""
    shape = (batch, capacity, num_kv_heads, head_dim)
    return tuple(
        LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )


def write_chunk(
    cache: LayerCache,
    k: Float[Array, "1 C K H"],
    v: Float[Array, "1 C K H"],
    slot: Int[Array, ""],
    offset: Int[Array, ""],
) -> LayerCache:
    """A prompt chunk of sequence `slot` goes to positions offset … offset + C - 1.

    offset + C must not pass the capacity: the update would be moved back over live rows.
    """
    start = (slot, offset, 0, 0)
    return LayerCache(
        lax.dynamic_update_slice(cache.k, k, start), lax.dynamic_update_slice(cache.v, v, start)
    )


def one_sequence(cache: LayerCache, slot: Int[Array, ""]) -> LayerCache:
    """The cache of one sequence, batch axis kept: what a prompt's chunk attends to."""
    return LayerCache(
        lax.dynamic_slice_in_dim(cache.k, slot, 1), lax.dynamic_slice_in_dim(cache.v, slot, 1)
    )
