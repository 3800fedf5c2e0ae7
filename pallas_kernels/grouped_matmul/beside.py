"""A shared expert's product beside the grouped one, in one launch, for few rows.

At so few rows a launch of its own costs more than the weights that it reads: it has a program for
every 64 columns, and most of the GPU waits. Here the same programs come after those of the tiles,
with the piece of K as one more tile. What each computes is the canonical product's own code, so
the bits are those of `matmul.gate_up` and `matmul.partial_products`.
Axes: M tokens, R rows, E experts, K and L summed over, P pieces of L, N columns.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.tokens_of import Tiles
from pallas_kernels.grouped_matmul.triton import BLOCK_K, divides, one_tile, width_of
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul import few_rows
from pallas_kernels.matmul.kept.quantised import Quantised
from pallas_kernels.matmul.kept.tiles import depth_of
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.tuning import SMS

ROWS = 16
WIDE = few_rows.Tile(rows=ROWS, columns=64, depth=BLOCK_K)
NARROW = few_rows.Tile(rows=ROWS, columns=32, depth=BLOCK_K, stages=8)
NARROWEST = few_rows.Tile(rows=ROWS, columns=16, depth=BLOCK_K, stages=8)
# One token's gates and ups of Qwen3.5-35B-A3B, 72 programs of 64 columns, took 12.0 µs so where 144
# of 32 took 13.8, and Qwen3-Coder-Next's 88 took 13.7 and 16.1 (an H200, jax 0.11.2, 2026-11-28,
# benchmarks/h200-experts-beside-tiles.json); what halves of them gain over devices is not known.
DEEP = few_rows.Tile(rows=ROWS, columns=64, depth=2 * BLOCK_K, warps=8)
HALF_FILLED = range(SMS // 2, SMS)


def tile_of(columns: int, count: int, gates_of: int | None = None) -> few_rows.Tile:
    """Of so many columns, and tiles of rows and pieces. Speed only, never a result's bits.

    A program waits for memory, so where there are fewer than multiprocessors each is to have half
    as many columns and more steps over K on their way, or more of K in a step: of gates and ups,
    which sum arrays over `gates_of`.
    """
    width = width_of(columns)
    if width < NARROW.columns:
        return NARROWEST
    programs = columns // width * count
    if width < WIDE.columns:
        return NARROW
    deep = gates_of is not None and gates_of % DEEP.depth == 0 and programs in HALF_FILLED
    return WIDE if programs >= SMS else DEEP if deep else NARROW


def fits(M: int, w: Any, shared: Any) -> bool:
    """Whether M tokens are one tile, and the shared expert's product has as many columns."""
    array = isinstance(shared, jax.Array) and shared.dtype == jnp.bfloat16
    return array and ROWS >= M and w.shape[2] == shared.shape[1]


def gate_up(
    x: Float[Array, "M K"],
    w: Float[Array, "E K FF"] | Quantised,
    tiles: Tiles,
    R: int,
    shared: Float[Array, "K FF"],
    firsts: tuple[Firsts, Firsts],
    interpret: bool = False,
) -> tuple[Float[Array, "R F"], Float[Array, "M F"]]:
    """The inner rows of the experts and of the shared one, where gates and ups have `firsts`."""
    return _call(x, w, tiles, R, x, shared, 1, firsts, interpret)


def matmul(
    x: Float[Array, "R K"],
    w: Float[Array, "E K N"] | Quantised,
    tiles: Tiles,
    R: int,
    inner: Float[Array, "M L"],
    shared: Float[Array, "L N"],
    columns: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "R N"], Float[Array, "P M N"]]:
    """The experts' outputs and the pieces of the shared one's, whose whole weight has `columns`."""
    P = pieces("matmul", shared.shape[0], columns or shared.shape[1])
    out, own = _call(x, w, tiles, R, inner, shared, P, (None, None), interpret)
    return out, own if P > 1 else own[None]


# An inner jit: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=(3, 6, 7, 8))
def _call(
    x, w, tiles: Tiles, R: int, inner, shared, P: int, firsts: tuple[Firsts | None, Firsts | None],
    interpret: bool,
):  # fmt: skip
    halves = firsts[1]
    M, columns = len(inner), shared.shape[1] // (2 if halves else 1)
    assert fits(M, w, shared) and divides(x.shape[1], columns)
    assert x.dtype == jnp.bfloat16 and shared.shape[0] % (P * BLOCK_K) == 0
    own = ((M, columns), x.dtype) if P == 1 else ((P, M, columns), jnp.float32)
    gate = few_rows.silu_times if halves else None
    gates_of = x.shape[1] if halves and not isinstance(w, Quantised) else None
    tile = tile_of(columns, len(tiles.expert) + P, gates_of)
    if interpret:
        tile = dataclasses.replace(tile, depth=few_rows.DEPTH)
    how = {"depth": depth_of(w, tile.depth), "firsts": firsts[0] or (0,), "gate": gate}
    how["share"], how["width"] = R // len(x), tile.columns
    last = {"tile": tile, "length": shared.shape[0] // P, "halves": halves}
    return pl.pallas_call(
        functools.partial(_kernel, how=how, last=last),
        name="experts_gate_up" if halves else "experts_matmul",
        grid=(columns // tile.columns, len(tiles.expert) + P),
        out_shape=[jax.ShapeDtypeStruct((R, columns), x.dtype), jax.ShapeDtypeStruct(*own)],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(tiles, x, w, inner, shared)


def _kernel(tiles, x_ref, w_ref, inner_ref, shared_ref, out_ref, own_ref, *, how, last):
    column, tile = pl.program_id(0), pl.program_id(1)
    count = tiles.expert.shape[0]

    @pl.when(tile < count)
    def _():
        one_tile(tiles, x_ref, w_ref, None, out_ref, column, tile, **how)

    @pl.when(tile >= count)
    def _():
        few_rows.one_tile(inner_ref, shared_ref, (), own_ref, (column, tile - count, 0), **last)
