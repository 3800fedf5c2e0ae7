"""The products with a weight rounded to e4m3, for a drafter: no output hangs on their bits.

Sums are float32. Where "canonical" may run, few rows go to Pallas-Triton and keep their dtype; else
x is rounded by its rows, and XLA multiplies codes by codes: on Hopper by cuBLASLt or by Triton,
whichever its autotuner found faster.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts, halves
from pallas_kernels.matmul import float8_triton
from pallas_kernels.matmul.few_rows import Tile, silu_times
from pallas_kernels.matmul.rounded import Rounded, rounded_rows

FEW_ROWS = 64
CORES = 132


def matmul(
    x: Float[Array, "M K"],
    w: Rounded,
    residual: Float[Array, "M N"] | None = None,
    *,
    backend: str,
) -> Float[Array, "M N"]:
    if (tile := tile_for(len(x), *w.shape, backend)) is not None:
        return _matmul(x, w, residual, tile)
    out = _sums(x, w).astype(x.dtype)
    return out if residual is None else residual + out


def gate_up(
    x: Float[Array, "M K"], w: Rounded, firsts: Firsts | None = None, *, backend: str
) -> Float[Array, "M F"]:
    (K, N), firsts = w.shape, firsts or (0, w.shape[1] // 2)
    if (tile := tile_for(len(x), K, N // 2, backend)) is not None:
        return _gate_up(x, w, tile, firsts)
    return silu_times(*halves(_sums(x, w), firsts)).astype(x.dtype)


def head_argmax(x: Float[Array, "M K"], head: Rounded, *, backend: str) -> Int[Array, " M"]:
    if (tile := tile_for(len(x), *head.shape, backend)) is not None:
        return _argmax(x, head, tile)
    return jnp.argmax(_sums(x, head), axis=-1).astype(jnp.int32)


def head_logits(x: Float[Array, "M K"], head: Rounded) -> Float[Array, "M V"]:
    return _sums(x, head)


def tile_for(M: int, K: int, columns: int, backend: str) -> Tile | None:
    """The Triton kernel's tile, of one half of gate and up; None where XLA multiplies."""
    if backend != "canonical" or M > FEW_ROWS or K % 128 or columns % 64:
        return None
    rows = max(16, 1 << (M - 1).bit_length())
    if columns <= 64 * CORES and rows == 16 and K % 256 == 0:
        return Tile(rows=rows, columns=32, depth=256)
    return Tile(rows=rows, columns=64, depth=128)


def _sums(x: Float[Array, "M K"], w: Rounded) -> Float[Array, "M N"]:
    rows = rounded_rows(x)
    sums = lax.dot_general(
        rows.codes, w.codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return sums * rows.scales[:, None] * w.scales


# One inner jit each: the call sites of all layers then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=3)
def _matmul(x, w, residual, tile: Tile):
    return float8_triton.product(x, w, residual, tile=tile)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gate_up(x, w, tile: Tile, firsts: Firsts):
    return float8_triton.product(x, w, tile=tile, halves=firsts)


@functools.partial(jax.jit, static_argnums=2)
def _argmax(x, head, tile: Tile):
    best, ids = float8_triton.best_of_tiles(x, head, tile=tile)
    return jnp.take_along_axis(ids, jnp.argmax(best, axis=0)[None], axis=0)[0]
