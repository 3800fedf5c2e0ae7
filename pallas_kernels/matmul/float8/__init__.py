"""The products with a weight rounded to e4m3, for a drafter: no output hangs on their bits.

Sums are float32. Where "canonical" may run, few rows go to Pallas-Triton and keep their dtype; else
x is rounded by its rows, and codes are multiplied by codes: there by a Mosaic GPU kernel, whose
sums the tensor core keeps with fewer bits than float32 has, and elsewhere by XLA.

Few rows are a block's 16. µs of a gate and up [4096, 24576] and a down [12288, 4096] on an H200
(jax 0.11.2, 2026-11-25) at 16, 32, 48, 64 and 128 rows, with some 4 of the loop around them: by
Triton 53.6, 61.3, 116.5, 119.1 and 32.8, 70.2, 90.9, 93.9; XLA's at 128 rows 40.8 and 28.0; arrays
of bfloat16 53.7, 56.5, 55.9, 57.2, 63.0 and 33.3, 32.7, 32.7, 33.3, 36.4. The same codes in
fragments, by `kept.mosaic`: 36.4, 50.0, 55.1, 60.4, 64.9 and 23.8, 24.1, 26.7, 28.9, 39.9.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.halves import Firsts, halves
from pallas_kernels.matmul.few_rows import Tile, silu_times
from pallas_kernels.matmul.float8 import mosaic, rounded_triton, triton
from pallas_kernels.matmul.float8.rounded import Rounded, rounded_rows
from pallas_kernels.matmul.reference import largest_and_sums

FEW_ROWS = 16
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
    out = _product(x, w, x.dtype, backend)
    return out if residual is None else residual + out


def gate_up(
    x: Float[Array, "M K"], w: Rounded, firsts: Firsts | None = None, *, backend: str
) -> Float[Array, "M F"]:
    (K, N), firsts = w.shape, firsts or (0, w.shape[1] // 2)
    if (tile := tile_for(len(x), K, N // 2, backend)) is not None:
        return _gate_up(x, w, tile, firsts)
    if _by_mosaic(K, N // 2, backend):
        return mosaic.product(rounded_triton.rounded_rows(x), w, dtype=x.dtype, halves=firsts)
    return silu_times(*halves(_sums(x, w), firsts)).astype(x.dtype)


def head_argmax(x: Float[Array, "M K"], head: Rounded, *, backend: str) -> Int[Array, " M"]:
    return head_largest(x, head, backend=backend)[0]


def head_largest(
    x: Float[Array, "M K"], head: Rounded, *, backend: str
) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    if (tile := tile_for(len(x), *head.shape, backend)) is not None:
        return _largest(x, head, tile)
    if _by_mosaic(*head.shape, backend):
        return mosaic.largest(rounded_triton.rounded_rows(x), head)
    sums = _sums(x, head)
    return jnp.argmax(sums, axis=-1).astype(jnp.int32), jnp.max(sums, axis=-1)


def head_confidence(
    x: Float[Array, "M K"], head: Rounded, *, backend: str
) -> tuple[Int[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    if _by_mosaic(*head.shape, backend):
        return mosaic.confidence(rounded_triton.rounded_rows(x), head)
    logits = _sums(x, head)
    return (jnp.argmax(logits, axis=-1).astype(jnp.int32), *largest_and_sums(logits))


def head_logits(x: Float[Array, "M K"], head: Rounded, *, backend: str) -> Float[Array, "M V"]:
    return _product(x, head, jnp.float32, backend)


def adds(M: int, w: Rounded, backend: str) -> bool:
    """Whether a product's kernel adds a residual itself."""
    return tile_for(M, *w.shape, backend) is not None


def tile_for(M: int, K: int, columns: int, backend: str) -> Tile | None:
    """The Triton kernel's tile, of one half of gate and up; None where XLA multiplies."""
    if backend != "canonical" or M > FEW_ROWS or K % 128 or columns % 64:
        return None
    if columns <= 64 * CORES and K % 256 == 0:
        return Tile(rows=FEW_ROWS, columns=32, depth=256)
    return Tile(rows=FEW_ROWS, columns=64, depth=128)


def _by_mosaic(K: int, columns: int, backend: str) -> bool:
    return backend == "canonical" and mosaic.refusal(K, columns) is None


def _product(
    x: Float[Array, "M K"], w: Rounded, dtype: DTypeLike, backend: str
) -> Float[Array, "M N"]:
    if _by_mosaic(*w.shape, backend):
        return mosaic.product(rounded_triton.rounded_rows(x), w, dtype=dtype)
    return _sums(x, w).astype(dtype)


def _sums(x: Float[Array, "M K"], w: Rounded) -> Float[Array, "M N"]:
    rows = rounded_rows(x)
    sums = lax.dot_general(
        rows.codes, w.codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return sums * rows.scales[:, None] * w.scales


# One inner jit each: the call sites of all layers then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=3)
def _matmul(x, w, residual, tile: Tile):
    return triton.product(x, w, residual, tile=tile)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gate_up(x, w, tile: Tile, firsts: Firsts):
    return triton.product(x, w, tile=tile, halves=firsts)


@functools.partial(jax.jit, static_argnums=2)
def _largest(x, head, tile: Tile):
    best, ids = triton.best_of_tiles(x, head, tile=tile)
    return jnp.take_along_axis(ids, jnp.argmax(best, axis=0)[None], axis=0)[0], best.max(axis=0)
