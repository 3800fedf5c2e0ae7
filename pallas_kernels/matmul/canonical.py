"""The GEMMs in the canonical form, with a kernel and a tile for every number of rows.

Few rows go to Pallas-Triton, with tiles of 16 rows or more and a program for each piece of K, or
to a Mosaic GPU kernel of their own where few columns make few programs of a long K
(`few_columns`). Many go to the Mosaic GPU kernel: one CTA takes the pieces in turn, or each piece
has other CTAs if the tiles would leave multiprocessors idle. `tiles` says which. Weights kept as
codes go to Triton at any number of rows, which converts them tile by tile. All add in one order, so
the choices change only the speed, and `pieces.pieces` decides the bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts
from pallas_kernels.matmul import few_columns, few_rows, mosaic_gpu, wide_mosaic
from pallas_kernels.matmul.few_columns import FewColumns
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.kept import alone as kept_alone
from pallas_kernels.matmul.kept import mosaic as kept_mosaic
from pallas_kernels.matmul.kept.fragments import Fragments
from pallas_kernels.matmul.kept.quantised import Quantised
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.tiles import AnyTile, Product, by_rule, few_rows_tile, tile_for
from pallas_kernels.matmul.tuning import HEADS, LEAST_SWIZZLE, Tuning
from pallas_kernels.matmul.wide_mosaic import Wide
from pallas_kernels.unsummed import Unsummed, summed

SUMS = ("matmul", "residual", "pieces")  # whose K may be cut


def matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"] | Quantised | Fragments,
    residual: Float[Array, "M N"] | None = None,
    *,
    columns: int | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    sums = unsummed(x, w, residual, columns=columns, interpret=interpret)
    return summed(sums, interpret=interpret)


def unsummed(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"] | Quantised | Fragments,
    residual: Float[Array, "M N"] | None = None,
    *,
    columns: int | None = None,
    interpret: bool = False,
) -> Unsummed:
    op = "matmul" if residual is None else "residual"
    out = _product(op, x, w, residual, columns=columns, interpret=interpret)
    return Unsummed(None, out) if out.ndim == 2 else Unsummed(out, residual)


def partial_products(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"] | Quantised | Fragments,
    *,
    columns: int | None = None,
    interpret: bool = False,
) -> Float[Array, "P M N"]:
    out = _product("pieces", x, w, columns=columns, interpret=interpret)
    return out[None] if out.ndim == 2 else out


def gate_up(
    x: Float[Array, "M K"],
    w: Float[Array, "K FF"] | Quantised | Fragments,
    firsts: Firsts | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    return _product("gate_up", x, w, firsts=firsts, interpret=interpret)


def head_argmax(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> Int[Array, " M"]:
    return _product("head_argmax", x, head, interpret=interpret)


def head_largest(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    _pieces("head_argmax", x, head, len(head))
    tile = tile_for(Product.of("head_argmax", len(x), x.shape[1], len(head), 1))
    if isinstance(tile, Tile):
        return _few_rows_largest(x, head, tile, interpret)
    assert isinstance(tile, Tuning), tile
    return mosaic_gpu.head_largest(x, head, tuning=tile, interpret=interpret)


def head_confidence(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> tuple[Int[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    product = Product.of("head_argmax", len(x), x.shape[1], head.shape[0], 1)
    _pieces("head_argmax", x, head, head.shape[0])
    tile = by_rule(product)  # sums of tiles make a confidence, which timing must not change
    if isinstance(tile, Tile):
        return _few_rows_confidence(x, head, tile, interpret)
    return mosaic_gpu.head_confidence(x, head, tuning=tile, interpret=interpret)


def head_logits(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, interpret: bool = False
) -> Float[Array, "M V"]:
    return _product("head_logits", x, head, interpret=interpret)


def _product(op: str, x, w, residual=None, *, columns=None, firsts=None, interpret=False):
    """As `_by_tile`, by the tile that these sizes have."""
    K, N = w.shape[::-1] if op in HEADS else w.shape
    P = _pieces("matmul" if op in SUMS else op, x, w, columns or N)
    if isinstance(w, Fragments):
        return _in_fragments(op, x, w, residual, P, firsts or (0, N // 2))
    product = Product.of(op, len(x), K, N, P)
    kept = isinstance(w, Quantised)
    tile = few_rows_tile(product, whole=True) if kept else tile_for(product)
    return _by_tile(tile, product, x, w, residual, firsts, interpret)


def _in_fragments(op: str, x, w: Fragments, residual, P: int, firsts: Firsts):
    out = _kept(x, w, P, firsts if op == "gate_up" else None)
    return out if P > 1 or residual is None else plus(residual, out)


def by_tile(
    tile: AnyTile,
    product: Product,
    x: Float[Array, "M K"],
    w: Any,
    residual: Float[Array, "M N"] | None = None,
    *,
    firsts: Firsts | None = None,
    interpret: bool = False,
) -> Any:
    """The product by this tile; x has the product's rows, or others that it stands for."""
    out = _by_tile(tile, product, x, w, residual, firsts, interpret)
    if product.op not in SUMS:
        return out
    if product.op == "pieces":
        return out[None] if out.ndim == 2 else out
    return out if out.ndim == 2 else summed(Unsummed(out, residual), interpret=interpret)


def _by_tile(tile: AnyTile, product: Product, x, w, residual, firsts, interpret: bool):
    """The result, or of SUMS any pieces [P, M, N] in float32."""
    if isinstance(tile, Wide):
        halves = (firsts or (0, product.columns)) if product.op == "gate_up" else None
        out = wide_mosaic.product(x, w, tile=tile, halves=halves, pieces=product.pieces)
        return out if residual is None else out[None]  # what follows adds the residual
    if isinstance(tile, FewColumns):
        if not interpret:
            return _few_columns(x, w, product.pieces, tile)
        tile = few_rows_tile(product)  # an interpreter knows no registers
    if isinstance(tile, Tile):
        return _by_few_rows(tile, product, x, w, residual, firsts, interpret)
    return _by_many_rows(tile, product, x, w, residual, firsts, interpret)


def _by_few_rows(tile: Tile, product: Product, x, w, residual, firsts, interpret: bool):
    if product.op == "gate_up":
        return _few_rows_gate_up(x, w, firsts or (0, product.columns), tile, interpret)
    if product.op == "head_argmax":
        return _few_rows_largest(x, w, tile, interpret)[0]
    if product.op == "head_logits":
        return _few_rows_logits(x, w, tile, interpret)
    residual = residual if product.pieces == 1 else None
    return _few_rows(x, w, residual, product.pieces, tile, interpret)


def _by_many_rows(tuning: Tuning, product: Product, x, w, residual, firsts, interpret: bool):
    how: dict[str, Any] = {"tuning": tuning, "interpret": interpret}
    if product.op == "gate_up":
        return mosaic_gpu.gate_up(x, w, firsts, **how)
    if product.op in HEADS:
        return getattr(mosaic_gpu, product.op)(x, w, **how)
    if tuning.split_k > 1:
        return mosaic_gpu.partial_products(x, w, **how)
    return mosaic_gpu.matmul(x, w, residual, **how)


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


def refusal(K: int, columns: int, kind: str = "any") -> str | None:
    """Why no kernel takes a weight of a kind of products (see the folder's Sizes)."""
    least = {"any": LEAST_SWIZZLE, "plain": LEAST_SWIZZLE // 2, "head": 1}[kind]
    if K % 64 or columns % least:
        return f"takes K in 64s and columns in {least}s, not {K} and {columns}"
    return None


def _pieces(op: str, x, w, columns: int) -> int:
    stored = x.dtype if isinstance(w, Quantised | Fragments) else w.dtype
    if not x.dtype == stored == jnp.bfloat16:
        raise ValueError(
            f"the canonical {op} takes bfloat16, got {x.dtype} and {stored}: use the backend 'xla'"
        )
    K = w.shape[1 if op in HEADS else 0]
    assert x.shape[1] == K, f"{op}: x has {x.shape[1]} columns to sum over, w {K}"
    if K % 64:
        raise ValueError(f"the canonical {op} takes K in 64s, got {K}: use the backend 'xla'")
    return pieces(op, K, columns)


# One inner jit each: the call sites of all layers then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _few_rows(x, w, residual, P: int, tile: Tile, interpret: bool):
    return few_rows.product(x, w, residual, pieces=P, tile=tile, interpret=interpret)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _few_columns(x, w, P: int, tile: FewColumns):
    return few_columns.product(x, w, pieces=P, tile=tile)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _kept(x, w: Fragments, P: int, firsts: Firsts | None):
    assert firsts or not w.paired, "columns in pairs are for gate_up"
    if kept_alone.takes(w, len(x)):
        return kept_alone.gated(x, w)
    tile = kept_mosaic.by_rule(len(x), w, P, 2 if firsts else 1)
    return kept_mosaic.product(x, w, pieces=P, tile=tile, halves=firsts)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _few_rows_gate_up(x, w, firsts: Firsts, tile: Tile, interpret: bool):
    return few_rows.product(x, w, pieces=1, tile=tile, halves=firsts, interpret=interpret)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _few_rows_largest(x, head, tile: Tile, interpret: bool):
    best, index, _ = few_rows.best_of_tiles(x, head, tile=tile, interpret=interpret)
    return mosaic_gpu.largest_of_all(best, index, head.shape[0])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _few_rows_confidence(x, head, tile: Tile, interpret: bool):
    best = few_rows.best_of_tiles(x, head, tile=tile, interpret=interpret)
    return mosaic_gpu.best_of_all(*best, head.shape[0])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _few_rows_logits(x, head, tile: Tile, interpret: bool):
    return few_rows.head_logits(x, head, tile=tile, interpret=interpret)
