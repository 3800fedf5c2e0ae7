"""Rows on the grid of absolute positions, and the memory of them, for backends that run chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 16  # positions: the most rows of a call that may be rolled back


class Rows(NamedTuple):
    """The inputs of the state's updates, in float32."""

    k: Float[Array, "B T Hk dk"]
    v: Float[Array, "B T Hv dv"]
    g: Float[Array, "B T Hv"]
    beta: Float[Array, "B T Hv"]


class Memory(NamedTuple):
    """The state before position `base`, and the rows since: position p at place p % (2 · CHUNK)."""

    state: Float[Array, "S Hv dk dv"]
    base: Int[Array, " S"]
    rows: Rows


class Span(NamedTuple):
    """The rows of a call: at positions start … start + T - 1 of each of its sequences. The first
    `real` are tokens and the others padding, and the first `kept` will never be rolled back.

    Sequence b lies at slots[b] of the memory and of the ring, and no two at one; None: at b.
    """

    start: Int[Array, " B"]
    real: Int[Array, " B"]
    kept: Int[Array, " B"]
    slots: Int[Array, " B"] | None = None

    @property
    def places(self) -> Int[Array, " B"]:
        """The slots."""
        return jnp.arange(len(self.start)) if self.slots is None else self.slots

    def of[T](self, kept: T) -> T:
        """What the call's sequences have of arrays of all slots."""
        return kept if self.slots is None else jax.tree.map(lambda x: x[self.slots], kept)

    def into[T](self, kept: T, new: T) -> T:
        """The arrays of all slots with what the call's sequences have now."""
        if self.slots is None:
            return new
        put = lambda all, x: all.at[self.slots].set(x, unique_indices=True)  # noqa: E731
        return jax.tree.map(put, kept, new)


def border_of(span: Span) -> Int[Array, " B"]:
    """The last border before the rows of a call that may be rolled back."""
    return (span.start + span.kept) // CHUNK * CHUNK


def lay_out(
    q: Float[Array, "B T Hk dk"],
    rows: Rows,
    memory: Memory,
    start: Int[Array, " B"],
    real: Int[Array, " B"],
) -> tuple[Float[Array, "B N C Hk dk"], Rows]:
    """Queries and rows of all positions from `base` on, in whole chunks; zeros past the last row.

    There are chunks enough for any start: up to 2 · CHUNK - 1 rows lie between base and start.
    """
    T = q.shape[1]
    chunks = -(-(2 * CHUNK - 1 + T) // CHUNK)
    place = jnp.arange(chunks * CHUNK)
    position = memory.base[:, None] + place
    ahead = position - start[:, None]  # of the call's rows
    old, new = ahead < 0, (ahead >= 0) & (ahead < real[:, None])
    at = jnp.where(old, position % (2 * CHUNK), 2 * CHUNK + jnp.clip(ahead, 0, T - 1))

    def laid(before, given, seen):
        both = given if before is None else jnp.concatenate([before, given], axis=1)
        index = at if before is not None else jnp.clip(ahead, 0, T - 1)
        tail = (1,) * (given.ndim - 2)
        placed = jnp.take_along_axis(both, index.reshape(*index.shape, *tail), axis=1)
        placed = jnp.where(seen.reshape(*seen.shape, *tail), placed, 0)
        return placed.reshape(len(placed), chunks, CHUNK, *given.shape[2:])

    every = jax.tree.map(lambda before, given: laid(before, given, old | new), memory.rows, rows)
    return laid(None, q, new), every


def outputs(
    out: Float[Array, "B N C Hv dv"], ahead: Int[Array, " B"], count: int
) -> Float[Array, "B T Hv dv"]:
    """The `count` rows that begin `ahead` positions after the base."""
    flat = out.reshape(len(out), -1, *out.shape[3:])
    index = ahead[:, None] + jnp.arange(count)
    return jnp.take_along_axis(flat, index[:, :, None, None], axis=1)


def commit(memory: Memory, rows: Rows, span: Span) -> Memory:
    """The memory that begins at the border, with the call's rows after it."""
    row, border = jnp.arange(rows.k.shape[1]), border_of(span)
    position = span.start[:, None] + row
    stays = (row < span.real[:, None]) & (position >= border[:, None])
    place = jnp.where(stays, position % (2 * CHUNK), 2 * CHUNK + row)
    sequence = span.places[:, None]

    def put(ring, given):
        return ring.at[sequence, place].set(given, mode="drop", unique_indices=True)

    base = span.into(memory.base, border)
    return Memory(memory.state, base, jax.tree.map(put, memory.rows, rows))
