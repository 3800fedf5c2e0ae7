"""RMSNorm in Pallas-Triton: one program a row, the same whatever M is and whatever lies beside it.

Squares of bfloat16 are whole in float32, so that it is all one whether a compiler joins a square
and the sum that follows it. XLA's norm is fused with its neighbours, by shape.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def rms_norm(x, scale, eps, *, interpret=False):
    """See the folder's contract. Without `interpret` it compiles for a GPU only."""
    if x.dtype != jnp.bfloat16 or scale.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"the canonical norm takes bfloat16, not x {x.dtype} and scale {scale.dtype}: use 'xla'"
        )
    return _rms_norm(x.reshape(-1, x.shape[-1]), scale, eps, interpret).reshape(x.shape)


# One inner jit: all norms of a model then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _rms_norm(x, scale, eps: float, interpret: bool):
    M, D = x.shape
    block = pl.next_power_of_2(D)
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, block=block),
        name="rms_norm",
        grid=(M,),
        out_shape=jax.ShapeDtypeStruct((M, D), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=max(1, min(8, block // 512)), num_stages=1),
        interpret=interpret,
    )(x, scale)


def _kernel(x_ref, scale_ref, out_ref, *, eps: float, block: int):
    D = x_ref.shape[1]
    row, columns = pl.program_id(0), jnp.arange(block)
    mask = None if block == D else columns < D
    at = jnp.full((block,), row), columns
    other = None if mask is None else 0.0
    x = plt.load(x_ref.at[at], mask=mask, other=other).astype(jnp.float32)
    scale = plt.load(scale_ref.at[columns], mask=mask, other=other)
    rms = lax.rsqrt(jnp.sum(x * x, axis=0) / D + eps)
    # Rounded where RMSNorm rounds: after the division, and after the scale.
    out = scale * (x * rms).astype(scale.dtype)
    plt.store(out_ref.at[at], out.astype(out_ref.dtype), mask=mask)
