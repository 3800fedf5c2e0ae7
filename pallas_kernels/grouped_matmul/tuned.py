"""The grouped GEMMs on Hopper: the Triton kernel for the shapes that it takes, XLA for others.

XLA's `ragged_dot` computes a product with all experts' weights, the kernel reads only those that
have rows. A kernel that is faster at some shape gets its table here.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import triton, xla


def grouped_matmul(
    x: Float[Array, "R K"], w: Float[Array, "E K N"], sizes: Int[Array, " E"]
) -> Float[Array, "R N"]:
    return _winner(x, w, w.shape[2]).grouped_matmul(x, w, sizes)


def grouped_gate_up(
    x: Float[Array, "R K"], w: Float[Array, "E K FF"], sizes: Int[Array, " E"]
) -> Float[Array, "R F"]:
    return _winner(x, w, w.shape[2] // 2).grouped_gate_up(x, w, sizes)


def _winner(x, w, columns: int):
    bfloat16 = x.dtype == w.dtype == jnp.bfloat16
    return triton if bfloat16 and triton.divides(x.shape[1], columns) else xla
