"""The reference with norms and a rotation of fixed order, for CPUs: one row, one result."""

import jax.numpy as jnp

from pallas_kernels.fixed_order import rounded
from pallas_kernels.heads_to_cache import reference
from pallas_kernels.rms_norm.cpu import rms_norm


def rotate(x, cos, sin):
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    a, b, c, d = rounded((first * cos, second * sin, second * cos, first * sin))
    return jnp.concatenate([a - b, c + d], axis=-1).astype(x.dtype)


def split_heads(x, q_scale, k_scale, cos, sin, heads, dtype):
    return reference.split_heads(
        x, q_scale, k_scale, cos, sin, heads, dtype, rms_norm=rms_norm, rotate=rotate
    )


def heads_to_cache(*arrays, heads, rising=True):
    return reference.heads_to_cache(*arrays, heads=heads, rising=rising, split=split_heads)
