"""What a step reads and writes: one key and one value array a layer, with places for positions.

A `LayerCache` has a slot for every position, a `RingCache` has slots for the positions inside a
window, and a `PagedCache` has pages of a pool that all sequences share. A step asks the cache for
slots and knows no more of it. Nothing is ever freed. The contents at and past a sequence's length
are garbage by definition: rollback is a smaller length, and the next step overwrites them.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from jflash.records.specs import AttentionSpec, DeltaSpec
from pallas_kernels.block_attention import PAGE
from pallas_kernels.gated_delta import CHUNK, Memory, Rows

RING_BLOCK = 64  # slots that Mosaic's attention kernel reads at a time: it takes whole ones only


@runtime_checkable
class LayerState(Protocol):
    """The interface of a layer's state, which the layer makes and reads.

    Caches of keys and values return themselves: rollback is a smaller length, and a slot's earlier
    contents are never seen. A recurrent state is zeroed for a new sequence.
    """

    def committed[S](self: S, count: Int[Array, " B"]) -> S:
        """The state once the first `count` rows of each sequence's last block are committed."""
        ...

    def cleared[S](self: S, slot: Int[Array, ""]) -> S:
        """The state before a new sequence begins in `slot`."""
        ...


class LayerCache(NamedTuple):
    """Keys (normed and rotated) and values of one layer; slot and position are one."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]

    def committed(self, count: Int[Array, " B"]) -> "LayerCache":
        return self

    def cleared(self, slot: Int[Array, ""]) -> "LayerCache":
        return self

    @property
    def wraps(self) -> bool:
        return False

    @property
    def table(self) -> None:
        return None

    def slots(
        self, positions: Int[Array, "B T"], kept: Bool[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """The positions' slots; those not `kept` get distinct slots past the end."""
        if kept is None:
            return positions
        return jnp.where(kept, positions, self.k.shape[1] + jnp.arange(positions.shape[1]))


class RingCache(NamedTuple):
    """Keys and values of a layer with a window: position p lies at slot p % S.

    With S of at least window + T - 1, a block of T tokens overwrites nothing that one of its rows
    or of a later block's rows sees, because no block begins before an earlier one. So a step may
    roll back all of its rows.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]

    def committed(self, count: Int[Array, " B"]) -> "RingCache":
        return self

    def cleared(self, slot: Int[Array, ""]) -> "RingCache":
        return self

    @property
    def wraps(self) -> bool:
        return True

    @property
    def table(self) -> None:
        return None

    def slots(
        self, positions: Int[Array, "B T"], kept: Bool[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """The positions' slots; those not `kept` get distinct slots past the end."""
        around = LayerCache(self.k, self.v)
        return around.slots(positions % self.k.shape[1], kept)


class PagedCache(NamedTuple):
    """Keys and values of one layer in pages of PAGE positions, and the sequences' page table.

    Position p of sequence b lies in page table[b, p // PAGE], at p % PAGE. All positions of a
    shared page are committed, so no sequence writes it. Writes to a table's entry that is no page
    are dropped. A window is only a mask here: nothing is overwritten.
    """

    k: Float[Array, "pages _ K H"]
    v: Float[Array, "pages _ K H"]
    table: Int[Array, "B _"] | None  # None between calls: each call brings one

    def committed(self, count: Int[Array, " B"]) -> "PagedCache":
        return self

    def cleared(self, slot: Int[Array, ""]) -> "PagedCache":
        return self

    @property
    def wraps(self) -> bool:
        return False

    def slots(
        self, positions: Int[Array, "B T"], kept: Bool[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """Slots in the pool, flattened; those not `kept` get distinct slots past the end."""
        assert self.table is not None, "a call brings the table"
        last = self.table.shape[1] - 1
        column = jnp.minimum(positions // PAGE, last)
        page = jnp.take_along_axis(self.table, column, axis=1)
        inside = (page >= 0) & (page < self.k.shape[0]) & (positions // PAGE <= last)
        kept = inside if kept is None else inside & kept
        past = self.k.shape[0] * PAGE + jnp.arange(positions.size).reshape(positions.shape)
        return jnp.where(kept, page * PAGE + positions % PAGE, past)

    def put(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], places: Int[Array, "B T"]
    ) -> "PagedCache":
        """The cache with rows written at places from `slots`."""

        def one(pool, new):
            flat = pool.reshape(-1, *pool.shape[2:])
            flat = flat.at[places].set(new, mode="drop", unique_indices=True)
            return flat.reshape(pool.shape)

        return self._replace(k=one(self.k, k), v=one(self.v, v))


class WindowCache(PagedCache):
    """Pages of a layer with a window, under a separate table: no page lies before the window.

    Their entries in the table may name any page, because no row sees them.
    """


class DeltaCache(NamedTuple):
    """A delta net's recurrent state, and the newest rows of its convolution.

    Rollback of both is a smaller start of the next block: `memory` keeps the rows since its base,
    and position p of `raw` lies at place p % R, with R ≥ CHUNK + taps - 1.
    """

    memory: Memory
    raw: Float[Array, "S R D"]
    slots: Int[Array, " B"] | None = None  # of a call's sequences, in an engine's calls over some

    def committed(self, count: Int[Array, " B"]) -> "DeltaCache":
        return self

    def cleared(self, slot: Int[Array, ""]) -> "DeltaCache":
        state, base, rows = self.memory
        return self._replace(memory=Memory(state.at[slot].set(0), base.at[slot].set(0), rows))


Cache = LayerCache | RingCache | PagedCache


def empty_delta(spec: DeltaSpec, batch: int, dtype: DTypeLike) -> DeltaCache:
    """A delta net's state of zeros, float32 except for the convolution's rows."""
    keys, values = (spec.num_key_heads, spec.key_dim), (spec.num_value_heads, spec.value_dim)
    rows = Rows(
        *(jnp.zeros((batch, 2 * CHUNK, *x)) for x in (keys, values, values[:1], values[:1]))
    )
    state = jnp.zeros((batch, values[0], spec.key_dim, spec.value_dim))
    raw = jnp.zeros((batch, CHUNK + spec.taps - 1, spec.mixed_width), dtype)
    return DeltaCache(Memory(state, jnp.zeros(batch, jnp.int32), rows), raw)


def ring_slots(window: int, rows: int, capacity: int) -> int:
    """Slots of a ring for `window` and at most `rows` tokens at once, in whole RING_BLOCKs.

    `capacity` is the most: such a ring never wraps.
    """
    return min(capacity, -(-(window + rows - 1) // RING_BLOCK) * RING_BLOCK)


def empty_cache(
    spec: AttentionSpec, batch: int, capacity: int, rows: int, dtype: DTypeLike
) -> Cache:
    """A layer's cache of zeros, a ring for a window; distinct arrays, so that they can be donated.

    At most `rows` tokens are written at once.
    """
    ring = spec.window is not None
    slots = capacity if spec.window is None else ring_slots(spec.window, rows, capacity)
    shape = (batch, slots, spec.num_kv_heads, spec.head_dim)
    k, v = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    return RingCache(k, v) if ring else LayerCache(k, v)


def write_chunk[C: Cache](
    cache: C,
    k: Float[Array, "1 C K H"],
    v: Float[Array, "1 C K H"],
    slot: Int[Array, ""],
    offset: Int[Array, ""],
) -> C:
    """Writes a prompt chunk of sequence `slot` at positions offset … offset + C - 1.

    Without pages offset + C must not pass the capacity: XLA would shift the update back over live
    rows. A ring has at least window + C - 1 slots, so padding only overwrites rows that no later
    row sees.
    """
    if isinstance(cache, PagedCache):
        one = one_sequence(cache, slot)
        one = one.put(k, v, one.slots((offset + jnp.arange(k.shape[1]))[None]))
        return cache._replace(k=one.k, v=one.v)
    if cache.wraps:
        positions = (offset + jnp.arange(k.shape[1])) % cache.k.shape[1]
        return cache._replace(
            k=cache.k.at[slot, positions].set(k[0], unique_indices=True),
            v=cache.v.at[slot, positions].set(v[0], unique_indices=True),
        )
    start = (slot, offset, 0, 0)
    return cache._replace(
        k=lax.dynamic_update_slice(cache.k, k, start),
        v=lax.dynamic_update_slice(cache.v, v, start),
    )


def write_context[C: Cache](
    cache: C,
    k: Float[Array, "1 C K H"],
    v: Float[Array, "1 C K H"],
    slot: Int[Array, ""],
    offset: Int[Array, ""],
    length: Int[Array, ""],
) -> C:
    """write_chunk of a prompt of `length` tokens, for rows that this prefill does not attend to.

    The ring may be shorter than a chunk: it gets no padding, which would overwrite live rows, and
    only the last rows.
    """
    if not isinstance(cache, RingCache):
        return write_chunk(cache, k, v, slot, offset)
    positions = (offset + jnp.arange(k.shape[1]))[None]
    end = jnp.minimum(length, offset + k.shape[1])
    slots = cache.slots(positions, (positions < end) & (positions >= end - cache.k.shape[1]))[0]

    def put(rows, new):
        return rows.at[slot, slots].set(new[0], mode="drop", unique_indices=True)

    return cache._replace(k=put(cache.k, k), v=put(cache.v, v))


def one_sequence[C: Cache](cache: C, slot: Int[Array, ""]) -> C:
    """The cache of one sequence, with its batch axis: a prompt's chunk attends to it."""
    if isinstance(cache, PagedCache):
        assert cache.table is not None, "a call brings the table"
        return cache._replace(table=lax.dynamic_slice_in_dim(cache.table, slot, 1))
    return cache._replace(
        k=lax.dynamic_slice_in_dim(cache.k, slot, 1), v=lax.dynamic_slice_in_dim(cache.v, slot, 1)
    )
