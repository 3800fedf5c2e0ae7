"""Rows rounded to e4m3 in Pallas-Triton: a program reads a row once, where XLA has two kernels."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.matmul.float8.rounded import DTYPE, LARGEST, Rounded


@functools.partial(jax.jit, static_argnames="interpret")
def rounded_rows(x: Float[Array, "R K"], *, interpret: bool = False) -> Rounded:
    """As `rounded.rounded_rows`."""
    R, K = x.shape
    block = pl.next_power_of_2(K)
    out = jax.ShapeDtypeStruct((R, K), DTYPE), jax.ShapeDtypeStruct((R,), jnp.float32)
    codes, scales = pl.pallas_call(
        functools.partial(_kernel, block=block),
        name="rounded_rows",
        grid=(R,),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=max(1, min(16, block // 512)), num_stages=1),
        interpret=interpret,
    )(x)
    return Rounded(codes, scales)


def _kernel(x_ref, codes_ref, scales_ref, *, block: int):
    row, columns = pl.program_id(0), jnp.arange(block)
    at, mask = (jnp.full((block,), row), columns), columns < x_ref.shape[1]
    x = plt.load(x_ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
    largest = jnp.max(jnp.abs(x))
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    plt.store(codes_ref.at[at], (x / scale).astype(DTYPE), mask=mask)
    plt.store(scales_ref.at[row], scale)
