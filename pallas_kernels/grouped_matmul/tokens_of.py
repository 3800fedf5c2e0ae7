"""Which rows each tile of a grouped product holds, from the experts of every token, without a sort.

A row is a token for one of its k experts: row t·k + i is token t's for its i-th, and keeps that
place through all products. Only this list knows which rows an expert has.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

MOST_COUNTED = 8192  # rows: counting compares each with all others
OWN, OTHERS = 32, 128  # rows of a program, and how many it compares with at once


class Tiles(NamedTuple):
    """Tiles of one expert's rows each; those that no row needs are anything.

    Entry i of tile t is a row's only if `places` has t·block + i there; without `places`, if it is
    not negative. So nothing has to be cleared before a routing is written. A tile whose expert is
    none of the weight's is empty too.
    """

    expert: Int[Array, " T"]
    members: Int[Array, "T block"]
    places: Int[Array, " R"] | None


def row_block(rows: int, experts: int) -> int:
    """Rows of a tile: what an expert gets on average, 16 (the least of a tensor core) to 64."""
    return min(64, max(16, pl.next_power_of_2(rows // experts)))


def tiles_of_tokens(ids: Int[Array, "M k"], experts: int, interpret: bool = False) -> Tiles:
    """The tiles of all rows whose expert is one of 0 … experts - 1; the others are in none."""
    (M, k), R = ids.shape, ids.size
    block = row_block(R, experts)
    if M == 1:  # its experts are different ones: a tile each
        members = np.full((k, block), -1, np.int32)
        members[:, 0] = np.arange(k)
        return Tiles(ids.reshape(-1).astype(jnp.int32), jnp.asarray(members), None)
    flat = ids.reshape(-1).astype(jnp.int32)
    return (_counted if R <= MOST_COUNTED else _sorted)(flat, experts, block, interpret)


def tile_count(rows: int, experts: int, block: int) -> int:
    """Tiles that are enough for any routing, and one for rows that have none."""
    return min(rows, rows // block + experts) + 1


def _first_tile(first: Array, ids: Array, rows: int, experts: int, block: int) -> Array:
    """An expert's first tile, if it has rows and `first` rows belong to lower ones.

    It has ⌈n / block⌉ tiles at most until the next expert's first one, by either rule.
    """
    return first if rows <= rows // block + experts else first // block + ids


# An inner jit: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _counted(ids: Int[Array, " R"], experts: int, block: int, interpret: bool) -> Tiles:
    R, T = len(ids), tile_count(len(ids), experts, block)
    return Tiles(*pl.pallas_call(
        functools.partial(_kernel, experts=experts, block=block),
        name="tiles_of_tokens",
        grid=(pl.cdiv(R, OWN),),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.int32) for s in ((T,), (T, block), (R,))],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(ids))  # fmt: skip


def _kernel(ids_ref, expert_ref, members_ref, places_ref, *, experts: int, block: int):
    R = ids_ref.shape[0]
    own = pl.program_id(0) * OWN + jnp.arange(OWN)
    ids = plt.load(ids_ref.at[own], mask=own < R, other=experts)

    def count(i, counts):
        rows = i * OTHERS + jnp.arange(OTHERS)
        others = plt.load(ids_ref.at[rows], mask=rows < R, other=experts)[None, :]
        lower = others < ids[:, None]
        before = (others == ids[:, None]) & (rows[None, :] < own[:, None])
        return tuple(n + x.astype(jnp.int32) for n, x in zip(counts, (lower, before), strict=True))

    # Every thread counts for itself: a sum over threads costs more than a turn of the loop.
    none = jnp.zeros((OWN, OTHERS), jnp.int32)
    counts = lax.fori_loop(0, pl.cdiv(R, OTHERS), count, (none, none))
    first, rank = (jnp.sum(n, axis=1) for n in counts)
    tile, place = _first_tile(first, ids, R, experts, block) + rank // block, rank % block
    # The last tile is for what belongs nowhere, and for no row's place.
    real = ids < experts
    tile = jnp.where(real, tile, expert_ref.shape[0] - 1)
    plt.store(expert_ref.at[tile], ids)
    plt.store(members_ref.at[tile, place], own)
    plt.store(places_ref.at[own], jnp.where(real, tile * block + place, -1), mask=own < R)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sorted(ids: Int[Array, " R"], experts: int, block: int, interpret: bool) -> Tiles:
    """The same tiles for many rows, by XLA's sort."""
    del interpret
    R, T = len(ids), tile_count(len(ids), experts, block)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    own = ids[order]
    first = jnp.sum(ids < jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)[own]
    rank = jnp.arange(R, dtype=jnp.int32) - first
    tile = _first_tile(first, own, R, experts, block) + rank // block
    tile = jnp.where(own < experts, tile, T - 1)  # whose expert is none
    members = jnp.full((T, block), -1, jnp.int32).at[tile, rank % block].set(order)
    expert = jnp.full(T, experts, jnp.int32).at[tile].set(own)
    places = jnp.where(own < experts, tile * block + rank % block, -1)
    return Tiles(expert, members, jnp.full(R, -1, jnp.int32).at[order].set(places))
