"""RMSNorm on a CPU: the squares are rounded, then added in one stated order."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.fixed_order import rounded, row_sum


def rms_norm(x, scale, eps):
    x32 = x.astype(jnp.float32)
    mean = rounded(row_sum(rounded(x32 * x32)) / x.shape[-1])
    normed = x32 * lax.rsqrt(mean + eps)
    # A consumer may add the result: the product must not become one operation with that sum.
    return rounded((scale * normed.astype(scale.dtype)).astype(x.dtype))
