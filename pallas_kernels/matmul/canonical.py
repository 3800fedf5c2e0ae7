"""The GEMMs in the canonical form, the same bits at every number of rows: which kernel, which tile.

Up to 64 rows go to Pallas-Triton, whose tiles hold 16 rows and whose pieces of K are programs of
their own. More go to the Mosaic GPU kernel: one CTA takes the pieces in turn, or, where its tiles
would leave multiprocessors idle, each piece has CTAs of its own. All add in one order, so what
is chosen here is speed alone; `pieces.pieces` is what decides the bits.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul import few_rows, mosaic_gpu
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.tuning import canonical_tuning

FEW_ROWS = 64


def matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"],
    residual: Float[Array, "M N"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    P = _pieces("matmul", x, w)
    if len(x) > FEW_ROWS:
        op = "matmul" if residual is None else "residual"
        tuning = canonical_tuning(op, x.shape[0], x.shape[1], w.shape[1], P)
        return mosaic_gpu.matmul(x, w, residual, tuning=tuning, interpret=interpret)
    out = _few_rows(x, w, residual if P == 1 else None, P, False, interpret)
    if P == 1:
        return out
    total = add_pieces(out).astype(x.dtype)
    if residual is None:
        return total
    return (residual.astype(jnp.float32) + total.astype(jnp.float32)).astype(x.dtype)


def partial_products(
    x: Float[Array, "M K"], w: Float[Array, "K N"], *, interpret: bool = False
) -> Float[Array, "P M N"]:
    P = _pieces("matmul", x, w)
    if len(x) > FEW_ROWS or P == 1:
        return matmul(x, w, interpret=interpret)[None]
    return _few_rows(x, w, None, P, False, interpret)


def gate_up(
    x: Float[Array, "M K"], w: Float[Array, "K FF"], *, interpret: bool = False
) -> Float[Array, "M F"]:
    _pieces("gate_up", x, w)
    if len(x) > FEW_ROWS:
        tuning = canonical_tuning("gate_up", x.shape[0], x.shape[1], w.shape[1], 1)
        return mosaic_gpu.gate_up(x, w, tuning=tuning, interpret=interpret)
    return _few_rows(x, w, None, 1, True, interpret)


def head_argmax(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> Int[Array, " M"]:
    _pieces("head_argmax", x, head)
    if len(x) > FEW_ROWS:
        tuning = canonical_tuning("head_argmax", x.shape[0], x.shape[1], head.shape[0], 1)
        return mosaic_gpu.head_argmax(x, head, tuning=tuning, interpret=interpret)
    return _few_rows_argmax(x, head, interpret)


def add_pieces(sums: Float[Array, "P M N"]) -> Float[Array, "M N"]:
    """Ascending, one after the other: `jnp.sum` would leave the order to the compiler."""
    return functools.reduce(jnp.add, list(sums))


def few_rows_tile(op: str, M: int, K: int, columns: int, P: int) -> Tile:
    """Columns are w's, of one half for gate_up. ValueError: no tile divides the shape."""
    rows = min(64, max(16, 1 << (M - 1).bit_length()))
    if op == "head_argmax":
        return Tile(rows=rows, columns=64, depth=128 if K % 128 == 0 else 64)
    width = next((c for c in (64, 32, 16) if columns % c == 0), None)
    if width is None or K % (64 * P):
        raise ValueError(f"canonical {op}: no tile divides [{M}, {K}] by {columns} columns")
    return Tile(rows=rows, columns=width, depth=64, stages=4 if op == "gate_up" else 6)


def _pieces(op: str, x, w) -> int:
    if not x.dtype == w.dtype == jnp.bfloat16:
        raise ValueError(
            f"the canonical {op} takes bfloat16, got {x.dtype} and {w.dtype}: use the backend 'xla'"
        )
    K, N = w.shape[::-1] if op == "head_argmax" else w.shape
    assert x.shape[1] == K, f"{op}: x has {x.shape[1]} columns to sum over, w {K}"
    if K % 64:
        raise ValueError(f"the canonical {op} takes K in 64s, got {K}: use the backend 'xla'")
    return pieces(op, K, N)


# One inner jit each: the call sites of all layers then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _few_rows(x, w, residual, P: int, gated: bool, interpret: bool):
    columns = w.shape[1] // (2 if gated else 1)
    tile = few_rows_tile("gate_up" if gated else "matmul", len(x), x.shape[1], columns, P)
    return few_rows.product(x, w, residual, pieces=P, tile=tile, gated=gated, interpret=interpret)


@functools.partial(jax.jit, static_argnums=(2,))
def _few_rows_argmax(x, head, interpret: bool):
    tile = few_rows_tile("head_argmax", len(x), x.shape[1], head.shape[0], 1)
    best, index, _ = few_rows.best_of_tiles(x, head, tile=tile, interpret=interpret)
    return jnp.where(best == best.max(axis=0), index, head.shape[0]).min(axis=0)
