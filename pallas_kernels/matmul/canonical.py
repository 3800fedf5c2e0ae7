"""The GEMMs in the canonical form, with a kernel and a tile for every number of rows.

Up to 64 rows go to Pallas-Triton, with tiles of 16 rows and a program for each piece of K. More go
to the Mosaic GPU kernel: one CTA takes the pieces in turn, or each piece has other CTAs if the
tiles would leave multiprocessors idle. Weights kept as codes go to Triton at any number of rows,
which converts them tile by tile. All add in one order, so the choices here change only the
speed, and `pieces.pieces` decides the bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts
from pallas_kernels.matmul import few_rows, mosaic_gpu
from pallas_kernels.matmul.add import add_pieces
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.quantised import Quantised
from pallas_kernels.matmul.tuning import Tuning, canonical_tuning

FEW_ROWS = 64


def matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"] | Quantised,
    residual: Float[Array, "M N"] | None = None,
    *,
    columns: int | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    P, tuning = _cut("matmul" if residual is None else "residual", x, w, columns)
    if P > 1 and (tuning is None or tuning.split_k > 1):
        sums = partial_products(x, w, columns=columns, interpret=interpret)
        return add_pieces(sums, residual, dtype=x.dtype, interpret=interpret)
    if tuning is None or isinstance(w, Quantised):
        return _few_rows(x, w, residual, 1, interpret)
    return mosaic_gpu.matmul(x, w, residual, tuning=tuning, interpret=interpret)


def partial_products(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"] | Quantised,
    *,
    columns: int | None = None,
    interpret: bool = False,
) -> Float[Array, "P M N"]:
    P, tuning = _cut("matmul", x, w, columns)
    if P > 1 and tuning is None:
        return _few_rows(x, w, None, P, interpret)
    if P > 1 and tuning and tuning.split_k > 1 and not isinstance(w, Quantised):
        return mosaic_gpu.partial_products(x, w, tuning=tuning, interpret=interpret)
    return matmul(x, w, columns=columns, interpret=interpret)[None]


def gate_up(
    x: Float[Array, "M K"],
    w: Float[Array, "K FF"] | Quantised,
    firsts: Firsts | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    _pieces("gate_up", x, w)
    if len(x) > FEW_ROWS and not isinstance(w, Quantised):
        tuning = canonical_tuning("gate_up", x.shape[0], x.shape[1], w.shape[1], 1)
        return mosaic_gpu.gate_up(x, w, firsts, tuning=tuning, interpret=interpret)
    return _few_rows_gate_up(x, w, firsts or (0, w.shape[1] // 2), interpret)


def head_argmax(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> Int[Array, " M"]:
    _pieces("head_argmax", x, head)
    if len(x) > FEW_ROWS:
        tuning = canonical_tuning("head_argmax", x.shape[0], x.shape[1], head.shape[0], 1)
        return mosaic_gpu.head_argmax(x, head, tuning=tuning, interpret=interpret)
    return _few_rows_argmax(x, head, interpret)


def head_confidence(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    _pieces("head_argmax", x, head)
    if len(x) > FEW_ROWS:
        tuning = canonical_tuning("head_argmax", x.shape[0], x.shape[1], head.shape[0], 1)
        return mosaic_gpu.head_confidence(x, head, tuning=tuning, interpret=interpret)
    return _few_rows_confidence(x, head, interpret)


def head_logits(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> Float[Array, "M V"]:
    _pieces("head_logits", x, head)
    if len(x) > FEW_ROWS:
        tuning = canonical_tuning("head_logits", x.shape[0], x.shape[1], head.shape[0], 1)
        return mosaic_gpu.head_logits(x, head, tuning=tuning, interpret=interpret)
    return _few_rows_logits(x, head, interpret)


def silu_times(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"]
) -> Float[Array, "*lead F"]:
    """gate_up's second half after biases were added: by XLA, entry by entry."""
    wide = (half.astype(jnp.float32) for half in (gate, up))
    return rounded(few_rows.silu_times(*wide)).astype(gate.dtype)


def plus(x: Float[Array, "*lead D"], y: Float[Array, "*#lead D"]) -> Float[Array, "*lead D"]:
    """x + y in x's dtype, each rounded before."""
    both = rounded(x.astype(jnp.float32)) + rounded(y.astype(jnp.float32))
    return rounded(both).astype(x.dtype)


def rounded(x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """Float32 rounded to bfloat16's numbers, where XLA would take back a conversion and its
    inverse wherever they meet, and with them the rounding."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def refusal(K: int, columns: int) -> str | None:
    """Why no kernel takes a weight that sums over K; gate_up's `columns` are those of one half."""
    if K % 64 or columns % 32:
        return f"takes K in 64s and columns in 32s, not {K} and {columns}"
    return None


def few_rows_tile(op: str, M: int, K: int, columns: int, P: int) -> Tile:
    """Columns are w's, of one half for gate_up. ValueError: no tile divides the shape."""
    rows = min(64, max(16, 1 << (M - 1).bit_length()))
    if op.startswith("head_"):
        return Tile(rows=rows, columns=64, depth=128 if K % 128 == 0 else 64)
    width = next((c for c in (64, 32, 16) if columns % c == 0), None)
    if width is None or K % (64 * P):
        raise ValueError(f"canonical {op}: no tile divides [{M}, {K}] by {columns} columns")
    return Tile(rows=rows, columns=width, depth=64, stages=4 if op == "gate_up" else 6)


def _cut(op: str, x, w, columns: int | None) -> tuple[int, Tuning | None]:
    """Pieces of K, and the Mosaic kernel's tuning; None for few rows and for kept weights."""
    P = _pieces("matmul", x, w, columns)
    if len(x) <= FEW_ROWS or isinstance(w, Quantised):
        return P, None
    return P, canonical_tuning(op, x.shape[0], x.shape[1], w.shape[1], P)


def _pieces(op: str, x, w, columns: int | None = None) -> int:
    stored = x.dtype if isinstance(w, Quantised) else w.dtype
    if not x.dtype == stored == jnp.bfloat16:
        raise ValueError(
            f"the canonical {op} takes bfloat16, got {x.dtype} and {stored}: use the backend 'xla'"
        )
    K, N = w.shape[::-1] if op.startswith("head_") else w.shape
    assert x.shape[1] == K, f"{op}: x has {x.shape[1]} columns to sum over, w {K}"
    if K % 64:
        raise ValueError(f"the canonical {op} takes K in 64s, got {K}: use the backend 'xla'")
    return pieces(op, K, columns or N)


# One inner jit each: the call sites of all layers then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _few_rows(x, w, residual, P: int, interpret: bool):
    tile = few_rows_tile("matmul", len(x), x.shape[1], w.shape[1], P)
    return few_rows.product(x, w, residual, pieces=P, tile=tile, interpret=interpret)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _few_rows_gate_up(x, w, firsts: Firsts, interpret: bool):
    tile = few_rows_tile("gate_up", len(x), x.shape[1], w.shape[1] // 2, 1)
    return few_rows.product(x, w, pieces=1, tile=tile, halves=firsts, interpret=interpret)


@functools.partial(jax.jit, static_argnums=(2,))
def _few_rows_argmax(x, head, interpret: bool):
    tile = few_rows_tile("head_argmax", len(x), x.shape[1], head.shape[0], 1)
    best, index, _ = few_rows.best_of_tiles(x, head, tile=tile, interpret=interpret)
    return jnp.where(best == best.max(axis=0), index, head.shape[0]).min(axis=0)


@functools.partial(jax.jit, static_argnums=(2,))
def _few_rows_confidence(x, head, interpret: bool):
    tile = few_rows_tile("head_argmax", len(x), x.shape[1], head.shape[0], 1)
    best = few_rows.best_of_tiles(x, head, tile=tile, interpret=interpret)
    return mosaic_gpu.best_of_all(*best, head.shape[0])


@functools.partial(jax.jit, static_argnums=(2,))
def _few_rows_logits(x, head, interpret: bool):
    tile = few_rows_tile("head_logits", len(x), x.shape[1], head.shape[0], 1)
    return few_rows.head_logits(x, head, tile=tile, interpret=interpret)
