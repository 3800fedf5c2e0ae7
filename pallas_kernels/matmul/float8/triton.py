"""Products of few rows with a weight in e4m3, in Pallas-Triton; x keeps its dtype.

They are bound by the weight's bytes: a tile of codes becomes x's dtype in registers, exactly, and a
column's scale multiplies its sum. Rounding x would take another kernel before each product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.grid import grid
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.few_rows import Tile, silu_times
from pallas_kernels.matmul.float8.rounded import Rounded


def product(
    x: Float[Array, "M K"],
    w: Rounded,
    residual: Float[Array, "M N"] | None = None,
    *,
    tile: Tile,
    halves: Firsts | None = None,
    interpret: bool = False,
) -> Float[Array, "M _"]:
    """x @ w, or residual + x @ w; of two `halves` one gates the other. ValueError as `few_rows`."""
    (K, N), M = w.shape, len(x)
    columns = N // 2 if halves else N
    if columns % tile.columns or K % tile.depth:
        raise ValueError(f"{tile} divides neither {columns} columns nor K {K}")
    out = jax.ShapeDtypeStruct((M, columns), x.dtype)
    inputs = (x, w) if residual is None else (x, w, residual)
    kernel = functools.partial(_kernel, tile=tile, halves=halves)
    name, programs = "float8_gate_up" if halves else "float8", columns // tile.columns
    return _call(kernel, name, programs, M, out, tile, interpret)(*inputs)


def best_of_tiles(
    x: Float[Array, "M K"], head: Rounded, *, tile: Tile, interpret: bool = False
) -> tuple[Float[Array, "C M"], Int[Array, "C M"]]:
    """Per column tile and row: the best logit, and the lowest id of it. ValueError as `product`."""
    (K, V), M = head.shape, len(x)
    if V % tile.columns or K % tile.depth:
        raise ValueError(f"{tile} divides neither {V} columns nor K {K}")
    tiles = V // tile.columns
    out = tuple(jax.ShapeDtypeStruct((tiles, M), t) for t in (jnp.float32, jnp.int32))
    kernel = functools.partial(_head_kernel, tile=tile)
    return _call(kernel, "float8_head", tiles, M, out, tile, interpret)(x, head)


def _call(kernel, name: str, programs: int, M: int, out, tile: Tile, interpret: bool):
    return pl.pallas_call(
        kernel, name=name, grid=(programs, pl.cdiv(M, tile.rows)), out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )  # fmt: skip


def _kernel(x_ref, w_ref, *rest, tile: Tile, halves: Firsts | None):
    *residual, out_ref = rest
    rows, columns = _places(tile)
    totals = _sums(x_ref, w_ref, rows, columns, halves or (0,), tile)
    mask = jnp.broadcast_to((rows < x_ref.shape[0])[:, None], totals[0].shape)
    out = silu_times(*totals) if halves else totals[0]
    if residual:
        at = grid(residual[0], rows, columns)
        out += plt.load(at, mask=mask, other=0.0).astype(jnp.float32)
    plt.store(grid(out_ref, rows, columns), out.astype(out_ref.dtype), mask=mask)


def _head_kernel(x_ref, head_ref, best_ref, id_ref, *, tile: Tile):
    rows, ids = _places(tile)
    [logits] = _sums(x_ref, head_ref, rows, ids, (0,), tile)
    best = jnp.max(logits, axis=1)
    lowest = jnp.where(logits == best[:, None], ids[None, :], jnp.int32(2**31 - 1))
    at = jnp.full(rows.shape, pl.program_id(0)), rows
    for ref, value in ((best_ref, best), (id_ref, jnp.min(lowest, axis=1))):
        plt.store(ref.at[at], value, mask=rows < best_ref.shape[1])


def _places(tile: Tile):
    """This program's rows and columns."""
    columns = pl.program_id(0) * tile.columns + jnp.arange(tile.columns)
    return pl.program_id(1) * tile.rows + jnp.arange(tile.rows), columns


def _sums(x_ref, w_ref, rows, columns, firsts, tile: Tile):
    """x @ w in float32, for the columns after each of `firsts`; rows past M are zeros."""
    M, K = x_ref.shape
    inside = jnp.broadcast_to((rows < M)[:, None], (rows.size, tile.depth))

    def add(i, totals):
        k = i * tile.depth + jnp.arange(tile.depth)
        at = grid(x_ref, rows, k)
        x = plt.load(at, mask=inside, other=0.0) if M % tile.rows else plt.load(at)
        codes = (plt.load(grid(w_ref.codes, columns + first, k)) for first in firsts)
        return tuple(
            total + plt.dot(x, code.astype(x.dtype), trans_b=True)
            for total, code in zip(totals, codes, strict=True)
        )

    zeros = jnp.zeros((rows.size, columns.size), jnp.float32)
    totals = lax.fori_loop(0, K // tile.depth, add, tuple(zeros for _ in firsts))
    return [
        total * plt.load(w_ref.scales.at[columns + first])[None, :]
        for total, first in zip(totals, firsts, strict=True)
    ]
