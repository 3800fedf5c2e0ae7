"""What a step reads and writes: one key and one value array a layer, with places for positions.

A `LayerCache` has a slot for every position, a `RingCache` for those that a window can still see.
A step asks the cache for slots and knows no more of it. Nothing is ever freed. What lies at and
past a sequence's length is garbage by definition: rollback is a smaller length, and the next step
overwrites it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

RING_BLOCK = 64  # slots that Mosaic's attention kernel reads at a time: it takes whole ones only


class LayerCache(NamedTuple):
    """Keys (normed and rotated) and values of one layer; slot and position are one."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]

    @property
    def wraps(self) -> bool:
        return False

    def slots(
        self, positions: Int[Array, "B T"], kept: Bool[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """Where positions lie; those not `kept` go past the end, each to a place of its own."""
        if kept is None:
            return positions
        return jnp.where(kept, positions, self.k.shape[1] + jnp.arange(positions.shape[1]))


class RingCache(NamedTuple):
    """Keys and values of a layer with a window: position p lies at slot p % S.

    With S of at least window + T - 1, a block of T tokens overwrites nothing that one of its rows
    sees, nor a row of any later block: a block never begins before an earlier one. So a step may
    take back all that it wrote.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]

    @property
    def wraps(self) -> bool:
        return True

    def slots(
        self, positions: Int[Array, "B T"], kept: Bool[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """Where positions lie; those not `kept` go past the end, each to a place of its own."""
        around = LayerCache(self.k, self.v)
        return around.slots(positions % self.k.shape[1], kept)


Cache = LayerCache | RingCache


def ring_slots(window: int, block_size: int, capacity: int) -> int:
    """Slots of a ring for `window` and blocks of `block_size`, whole RING_BLOCKs of them.

    No more than `capacity`, which is never reached: then the ring does not wrap.
    """
    return min(capacity, -(-(window + block_size - 1) // RING_BLOCK) * RING_BLOCK)


def empty_cache(
    num_layers: int, batch: int, capacity: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """Caches of zeros, one a layer; every array its own, so that all of them can be donated."""
    shape = (batch, capacity, num_kv_heads, head_dim)
    return tuple(
        LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )


def with_rings(
    caches: Sequence[LayerCache], windows: Sequence[int | None], block_size: int
) -> tuple[Cache, ...]:
    """Empty caches, with a ring for each layer that has a window."""
    rings = []
    for cache, window in zip(caches, windows, strict=True):
        if window is not None:
            size = ring_slots(window, block_size, cache.k.shape[1])
            cache = RingCache(cache.k[:, :size], cache.v[:, :size])
        rings.append(cache)
    return tuple(rings)


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


def write_context[C: Cache](
    cache: C,
    k: Float[Array, "1 C K H"],
    v: Float[Array, "1 C K H"],
    slot: Int[Array, ""],
    offset: Int[Array, ""],
    length: Int[Array, ""],
) -> C:
    """write_chunk of a prompt of `length` tokens, into any cache, for what nobody attends to yet.

    A ring takes no padding, which would lie on live rows, and of a chunk longer than itself the
    last rows alone.
    """
    if isinstance(cache, LayerCache):
        return write_chunk(cache, k, v, slot, offset)
    positions = (offset + jnp.arange(k.shape[1]))[None]
    end = jnp.minimum(length, offset + k.shape[1])
    slots = cache.slots(positions, (positions < end) & (positions >= end - cache.k.shape[1]))[0]

    def put(rows, new):
        return rows.at[slot, slots].set(new[0], mode="drop", unique_indices=True)

    return cache._replace(k=put(cache.k, k), v=put(cache.v, v))


def one_sequence(cache: LayerCache, slot: Int[Array, ""]) -> LayerCache:
    """The cache of one sequence, batch axis kept: what a prompt's chunk attends to."""
    return LayerCache(
        lax.dynamic_slice_in_dim(cache.k, slot, 1), lax.dynamic_slice_in_dim(cache.v, slot, 1)
    )
