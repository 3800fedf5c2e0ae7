"""Which tiles of rows a routing fills, as a list without gaps: what a kernel whose CTAs stay walks.

Up to FEW tokens each expert has one tile, which holds them all, so no row is gathered: those that
the expert was not chosen for are multiplied in vain. Of more tokens the tiles are those of
`tiles_of_tokens`. Either way a row's place is an index into the tiles' rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.grid import grid
from pallas_kernels.grouped_matmul.tokens_of import Tiles

FEW = 16
AT_ONCE = 32  # rows that a program compares with all experts
COLUMNS = 1024  # of a program that brings rows


class Used(NamedTuple):
    """The tiles of rows that have some, in any order: the first `count` entries."""

    expert: Int[Array, " T"]
    tile: Int[Array, " T"]
    count: Int[Array, " 1"]


def of_few(ids: Int[Array, "M k"], experts: int, interpret: bool = False) -> Used:
    """The experts with some rows; tile e is that of expert e."""
    if len(ids) == 1:  # its experts are different ones
        own = ids.reshape(-1).astype(jnp.int32)
        return Used(own, own, jnp.full(1, own.size, jnp.int32))
    expert, count = _few(ids.reshape(-1).astype(jnp.int32), experts, interpret)
    return Used(expert, expert, count)


# An inner jit each: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _few(ids: Int[Array, " R"], experts: int, interpret: bool):
    T = min(len(ids), experts) + 1  # the last is for what is not used
    return pl.pallas_call(
        functools.partial(_few_kernel, experts=experts),
        name="experts_used",
        out_shape=[jax.ShapeDtypeStruct((n,), jnp.int32) for n in (T, 1)],
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(ids)


def _few_kernel(ids_ref, expert_ref, count_ref, *, experts: int):
    R, every = ids_ref.shape[0], jnp.arange(pl.next_power_of_2(experts))
    found = jnp.zeros((AT_ONCE, every.size), jnp.int32)
    for i in range(pl.cdiv(R, AT_ONCE)):  # no loop: all are asked for at once
        own = i * AT_ONCE + jnp.arange(AT_ONCE)
        ids = plt.load(ids_ref.at[own], mask=own < R, other=-1)
        found = found | (ids[:, None] == every[None, :]).astype(jnp.int32)
    _store_used(jnp.max(found, axis=0), expert_ref.shape[0], count_ref, (expert_ref, every))


def _store_used(used, T: int, count_ref, *pairs):
    """Stores those values of each pair that are used without gaps, and others in the last entry."""
    rank = jnp.where(used > 0, jnp.cumsum(used) - 1, T - 1)
    for ref, values in pairs:
        plt.store(ref.at[rank], values)
    plt.store(count_ref.at[jnp.zeros(used.size, jnp.int32)], jnp.full(used.size, jnp.sum(used)))


def of_many(tiles: Tiles, interpret: bool = False) -> Used:
    """Those of the tiles that a row is in; `tiles` have places, and their last one no row."""
    assert tiles.places is not None
    return _many(tiles, interpret)


@functools.partial(jax.jit, static_argnums=1)
def _many(tiles: Tiles, interpret: bool) -> Used:
    T = len(tiles.expert)
    return Used(*pl.pallas_call(
        _many_kernel,
        name="tiles_used",
        out_shape=[jax.ShapeDtypeStruct((n,), jnp.int32) for n in (T, T, 1)],
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(tiles))  # fmt: skip


def _many_kernel(tiles, expert_ref, tile_ref, count_ref):
    (T, block), R = tiles.members.shape, tiles.places.shape[0]
    every = jnp.arange(pl.next_power_of_2(T))
    first = plt.load(
        tiles.members.at[every, jnp.zeros(every.size, jnp.int32)], mask=every < T, other=-1
    )
    inside = (first >= 0) & (first < R) & (every < T)
    places = plt.load(tiles.places.at[jnp.where(inside, first, 0)])
    used = (inside & (places == every * block)).astype(jnp.int32)
    expert = plt.load(tiles.expert.at[every], mask=every < T, other=0)
    _store_used(used, T, count_ref, (expert_ref, expert), (tile_ref, every))


def rows_of(
    x: Float[Array, "M K"], tiles: Tiles, used: Used, k: int, interpret: bool = False
) -> Float[Array, "TR K"]:
    """Each used tile's rows of x, one after another, of k a token. The others are anything."""
    return _rows(x, tiles, used, k, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _rows(x, tiles: Tiles, used: Used, k: int, interpret: bool):
    T, block = tiles.members.shape
    return pl.pallas_call(
        functools.partial(_rows_kernel, k=k),
        name="rows_of_tiles",
        grid=(pl.cdiv(x.shape[1], COLUMNS), T),
        out_shape=jax.ShapeDtypeStruct((T * block, x.shape[1]), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(x, tiles.members, used)


def _rows_kernel(x_ref, members_ref, used, out_ref, *, k: int):
    entry, block = pl.program_id(1), members_ref.shape[1]
    columns = pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS)

    @pl.when(entry < used.count[0])
    def _():
        tile, places = used.tile[entry], jnp.arange(block)
        members = plt.load(members_ref.at[jnp.full(block, tile), places])
        own = jnp.clip(members // k, 0, x_ref.shape[0] - 1)  # nobody's entries: of some token
        mask = jnp.broadcast_to((columns < x_ref.shape[1])[None, :], (block, COLUMNS))
        rows = plt.load(grid(x_ref, own, columns), mask=mask)
        plt.store(grid(out_ref, tile * block + places, columns), rows, mask=mask)
