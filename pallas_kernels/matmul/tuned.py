"""The GEMMs, each by whichever of XLA and the Mosaic GPU kernel won on an H200 at its shape.

`tuning.WINS` lists the kernel's wins in whole steps; every other shape goes to XLA. A single row
makes XLA leave its tensor-core kernels for reductions on the vector units (at [1, 4096] by
[4096, 4096] 45 µs in place of 10 on an H200), so it goes in 16 times.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts
from pallas_kernels.matmul import mosaic_gpu, xla
from pallas_kernels.matmul.tuning import pieces_of, winner

ROWS = 16


def matmul(
    x: Float[Array, "M K"], w: Float[Array, "K N"], residual: Float[Array, "M N"] | None = None
) -> Float[Array, "M N"]:
    tuning = winner("matmul", x.shape[0], x.shape[1], w.shape[1])
    if tuning and x.dtype == w.dtype == jnp.bfloat16:
        return mosaic_gpu.matmul(x, w, residual, tuning=tuning)
    out = xla.matmul(_several(x), w)[: len(x)]
    return out if residual is None else residual + out


def partial_products(x: Float[Array, "M K"], w: Float[Array, "K N"]) -> Float[Array, "P M N"]:
    pieces = pieces_of(x.shape[0], x.shape[1], w.shape[1])
    if pieces == 1 or x.dtype != jnp.bfloat16:
        return matmul(x, w)[None]
    rows = _several(x)
    cut = rows.reshape(len(rows), pieces, -1), w.reshape(pieces, -1, w.shape[1])
    sums = jnp.einsum("RPK,PKN->PRN", *cut, preferred_element_type=jnp.float32)
    return sums[:, : len(x)]


def gate_up(
    x: Float[Array, "M K"], w: Float[Array, "K FF"], firsts: Firsts | None = None
) -> Float[Array, "M F"]:
    tuning = winner("gate_up", x.shape[0], x.shape[1], w.shape[1])
    if tuning and x.dtype == w.dtype == jnp.bfloat16:
        return mosaic_gpu.gate_up(x, w, firsts, tuning=tuning)
    return xla.gate_up(_several(x), w, firsts)[: len(x)]


def head_argmax(x: Float[Array, "M K"], head: Float[Array, "V K"]) -> Int[Array, " M"]:
    tuning = winner("head_argmax", x.shape[0], x.shape[1], head.shape[0])
    if tuning and x.dtype == head.dtype == jnp.bfloat16:
        return mosaic_gpu.head_argmax(x, head, tuning=tuning)
    return xla.head_argmax(x, head)


def _several(x: Float[Array, "M K"]) -> Float[Array, "M2 K"]:
    # Unlike padding, a broadcast fuses into the product.
    return jnp.broadcast_to(x, (ROWS, x.shape[1])) if len(x) == 1 else x
