"""The chunk form on a CPU, with sums in a fixed order: a row has the same bits in every program."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fixed_order import rounded, row_sum
from pallas_kernels.gated_delta import xla
from pallas_kernels.rms_norm.cpu import rms_norm


def scan(state, q, rows, kept):
    return xla.scan(state, q, rows, kept, rounded)


def convolve(raw, weights):
    taps = weights.shape[1]
    count = raw.shape[1] - taps + 1
    wide, weights = raw.astype(jnp.float32), weights.astype(jnp.float32)
    products = rounded([weights[:, i] * wide[:, i : i + count] for i in range(taps)])
    total = products[0]
    for product in products[1:]:
        total = total + product
    return jax.nn.silu(rounded(total)).astype(raw.dtype)


def unit(x):
    return rounded(x * rounded(lax.rsqrt(row_sum(rounded(x * x)) + 1e-6)))


def gates(a, b, a_log, dt_bias):
    kept = rounded(jax.nn.softplus(rounded(a + dt_bias)))
    return rounded(-jnp.exp(a_log) * kept), rounded(jax.nn.sigmoid(rounded(b)))


def gated_norm(out, z, scale, eps):
    normed = rounded(rms_norm(rounded(out.astype(z.dtype)), scale, eps)).astype(jnp.float32)
    return rounded((normed * jax.nn.silu(rounded(z.astype(jnp.float32)))).astype(z.dtype))
