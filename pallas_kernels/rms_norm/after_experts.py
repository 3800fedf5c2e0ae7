"""RMSNorm in Pallas-Triton of what a layer of experts left to be added, in the kernel that adds it.

A program has a whole row. Its sum is `expert_sum`'s and its norm `canonical`'s, of the same bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.grouped_matmul.sums import Weighed, total_of
from pallas_kernels.rms_norm.canonical import by_rows, check, load_scale, store_normed

WARPS = 8


def after_experts(given: Weighed, scale, eps, *, interpret=False):
    """As `canonical.after`: the sum, and its norm."""
    residual = given.residual
    assert residual is not None
    check(residual, scale)
    flat = given._replace(residual=residual.reshape(-1, residual.shape[-1]))
    x, normed = _after_experts(flat, scale, eps, interpret)
    return x.reshape(residual.shape), normed.reshape(residual.shape)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _after_experts(given: Weighed, scale, eps: float, interpret: bool):
    like = (given.residual, given.residual)
    launch = by_rows(_kernel, "expert_sum_and_norm", like, eps, WARPS, interpret)
    return launch(given, scale)


def _kernel(given, scale_ref, x_ref, out_ref, *, eps: float, block: int):
    columns, row = jnp.arange(block), pl.program_id(0)
    inside = columns < out_ref.shape[1]
    at = jnp.full((block,), row), columns
    scale = load_scale(scale_ref, at, inside)
    x = total_of(given, row, columns, inside).astype(x_ref.dtype)
    plt.store(x_ref.at[at], x, mask=inside)
    store_normed(x, scale, out_ref, at, inside, eps)
