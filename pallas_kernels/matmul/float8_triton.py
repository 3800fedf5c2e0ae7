"""Products with a weight in e4m3, in Pallas-Triton.

x may be rounded too: its scales multiply the sums, as the weight's do. Where it is not, a tile of
codes becomes x's dtype in registers, exactly: few rows are bound by the weight's bytes, and save
the kernel that would round them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.grid import grid
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.few_rows import Tile, silu_times
from pallas_kernels.matmul.rounded import Rounded

Rows = Float[Array, "M K"] | Rounded


def product(
    x: Rows,
    w: Rounded,
    residual: Float[Array, "M N"] | None = None,
    *,
    dtype: DTypeLike,
    pieces: int,
    tile: Tile,
    halves: Firsts | None = None,
    interpret: bool = False,
) -> Float[Array, "..."]:
    """As `few_rows.product`: pieces [P, M, N] in float32, or of one piece the result."""
    (K, N), M = w.shape, _array(x).shape[0]
    columns = N // 2 if halves else N
    if columns % tile.columns or K % (pieces * tile.depth):
        raise ValueError(f"{tile} divides neither {columns} columns nor {pieces} pieces of {K}")
    out = (
        jax.ShapeDtypeStruct((M, columns), dtype)
        if pieces == 1
        else jax.ShapeDtypeStruct((pieces, M, N), jnp.float32)
    )
    assert pieces == 1 or not (halves or residual is not None), "pieces are added first"
    inputs = (x, w) if residual is None else (x, w, residual)
    kernel = functools.partial(_kernel, tile=tile, length=K // pieces, halves=halves)
    grid = (columns // tile.columns, pieces, pl.cdiv(M, tile.rows))
    return _call(kernel, "float8_gate_up" if halves else "float8", grid, out, tile, interpret)(
        *inputs
    )


def best_of_tiles(
    x: Rows, head: Rounded, *, tile: Tile, interpret: bool = False
) -> tuple[Float[Array, "C M"], Int[Array, "C M"]]:
    """Per column tile and row: the best logit, and the lowest id of it."""
    (K, V), M = head.shape, _array(x).shape[0]
    if V % tile.columns or K % tile.depth:
        raise ValueError(f"{tile} divides neither {V} columns nor K {K}")
    tiles = V // tile.columns
    out = tuple(jax.ShapeDtypeStruct((tiles, M), t) for t in (jnp.float32, jnp.int32))
    kernel = functools.partial(_head_kernel, tile=tile)
    return _call(kernel, "float8_head", (tiles, 1, pl.cdiv(M, tile.rows)), out, tile, interpret)(
        x, head
    )


def _call(kernel, name: str, grid, out, tile: Tile, interpret: bool):
    return pl.pallas_call(
        kernel, name=name, grid=grid, out_shape=out, interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


def _kernel(x_ref, w_ref, *rest, tile: Tile, length: int, halves: Firsts | None):
    *residual, out_ref = rest
    rows, columns = _places(tile)
    totals = _sums(x_ref, w_ref, rows, columns, halves or (0,), tile, pl.program_id(1), length)
    inside = rows < _array(x_ref).shape[0]
    mask = jnp.broadcast_to(inside[:, None], totals[0].shape)
    if len(out_ref.shape) == 3:
        plt.store(grid(out_ref, rows, columns, pl.program_id(1)), totals[0], mask=mask)
        return
    out = silu_times(*totals) if halves else totals[0]
    if residual:
        at = grid(residual[0], rows, columns)
        out += plt.load(at, mask=mask, other=0.0).astype(jnp.float32)
    plt.store(grid(out_ref, rows, columns), out.astype(out_ref.dtype), mask=mask)


def _head_kernel(x_ref, head_ref, best_ref, id_ref, *, tile: Tile):
    rows, ids = _places(tile)
    [logits] = _sums(x_ref, head_ref, rows, ids, (0,), tile, 0, head_ref.shape[0])
    best = jnp.max(logits, axis=1)
    lowest = jnp.where(logits == best[:, None], ids[None, :], jnp.int32(2**31 - 1))
    at = jnp.full(rows.shape, pl.program_id(0)), rows
    for ref, value in ((best_ref, best), (id_ref, jnp.min(lowest, axis=1))):
        plt.store(ref.at[at], value, mask=rows < best_ref.shape[1])


def _places(tile: Tile):
    """This program's rows and columns."""
    columns = pl.program_id(0) * tile.columns + jnp.arange(tile.columns)
    return pl.program_id(2) * tile.rows + jnp.arange(tile.rows), columns


def _sums(x_ref, w_ref, rows, columns, firsts, tile: Tile, piece, length: int):
    """x @ w over one piece of K, for the columns after each of `firsts`."""
    x_array: Any = _array(x_ref)
    M = x_array.shape[0]
    inside = jnp.broadcast_to((rows < M)[:, None], (rows.size, tile.depth))

    def add(i, totals):
        k = piece * length + i * tile.depth + jnp.arange(tile.depth)
        at = grid(x_array, rows, k)
        x = plt.load(at, mask=inside, other=0.0) if M % tile.rows else plt.load(at)
        codes = (plt.load(grid(w_ref.codes, columns + first, k)) for first in firsts)
        return tuple(
            total + plt.dot(x, code.astype(x.dtype), trans_b=True)
            for total, code in zip(totals, codes, strict=True)
        )

    zeros = jnp.zeros((rows.size, columns.size), jnp.float32)
    totals = lax.fori_loop(0, length // tile.depth, add, tuple(zeros for _ in firsts))
    if isinstance(x_ref, Rounded):
        of_rows: Any = x_ref.scales
        scales = plt.load(of_rows.at[rows], mask=rows < M, other=0.0)
        totals = [total * scales[:, None] for total in totals]
    return [
        total * plt.load(w_ref.scales.at[columns + first])[None, :]
        for total, first in zip(totals, firsts, strict=True)
    ]


def _array(x):
    return x.codes if isinstance(x, Rounded) else x
