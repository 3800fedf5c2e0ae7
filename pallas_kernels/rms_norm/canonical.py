"""RMSNorm in Pallas-Triton: one program a row, the same whatever M is and whatever lies beside it.

A row is summed in pairs, here and after a sum: what is loaded then decides no bit. Squares of
bfloat16 are whole in float32, so that it is all one whether a compiler joins a square and the sum
that follows it. All that a program reads is on its way before its first write, which no read may
pass, and before its first sum over threads, for which they wait. XLA's norm is fused with its
neighbours, by shape.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.in_pairs import sum_in_pairs
from pallas_kernels.unsummed import Unsummed


def rms_norm(x, scale, eps, *, interpret=False):
    """See the folder's contract. Without `interpret` it compiles for a GPU only."""
    check(x, scale)
    return _rms_norm(x.reshape(-1, x.shape[-1]), scale, eps, interpret).reshape(x.shape)


def after(sums: Unsummed, scale, eps, *, interpret=False):
    """As `rms_norm`, of what the pieces make in the same kernel."""
    pieces, residual = sums
    assert pieces is not None and residual is not None
    check(residual, scale)
    width = residual.shape[-1]
    flat = pieces.reshape(len(pieces), -1, width), residual.reshape(-1, width)
    x, normed = _after(*flat, scale, eps, interpret)
    return x.reshape(residual.shape), normed.reshape(residual.shape)


def check(x, scale):
    if x.dtype != jnp.bfloat16 or scale.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"the canonical norm takes bfloat16, not x {x.dtype} and scale {scale.dtype}: use 'xla'"
        )


# One inner jit each: all norms of a model then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _rms_norm(x, scale, eps: float, interpret: bool):
    warps = max(1, min(8, pl.next_power_of_2(x.shape[1]) // 512))
    return by_rows(_kernel, "rms_norm", x, eps, warps, interpret)(x, scale)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _after(pieces, residual, scale, eps: float, interpret: bool):
    # µs by 2, 4 and 8 warps on an H100 (jax 0.11.2, 2026-11-25), 16 rows: of 576 2.59, 2.37 and
    # 2.25, of 2048 2.97, 2.97 and 2.71, of 4096 3.18, 2.72 and 2.66.
    warps = max(1, min(8, pl.next_power_of_2(residual.shape[1]) // 32))
    launch = by_rows(_kernel_after, "sum_and_norm", (residual, residual), eps, warps, interpret)
    return launch(pieces, residual, scale)


def by_rows(kernel, name: str, like, eps: float, warps: int, interpret: bool):
    """A launch of a program a row, whose results are like arrays [M, D]."""
    M, D = jax.tree.leaves(like)[0].shape
    block = pl.next_power_of_2(D)
    return pl.pallas_call(
        functools.partial(kernel, eps=eps, block=block),
        name=name,
        grid=(M,),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )


def _kernel(x_ref, scale_ref, out_ref, *, eps: float, block: int):
    at, mask = _places(out_ref, block)
    scale = load_scale(scale_ref, at, mask)
    store_normed(_load(x_ref, at, mask), scale, out_ref, at, mask, eps)


def _kernel_after(pieces_ref, residual_ref, scale_ref, x_ref, out_ref, *, eps: float, block: int):
    at, mask = _places(out_ref, block)
    scale = load_scale(scale_ref, at, mask)
    numbers = (jnp.full((block,), p) for p in range(pieces_ref.shape[0]))
    pieces = (_load(pieces_ref, (number, *at), mask) for number in numbers)
    total = functools.reduce(jnp.add, pieces).astype(x_ref.dtype).astype(jnp.float32)
    x = (_load(residual_ref, at, mask).astype(jnp.float32) + total).astype(x_ref.dtype)
    plt.store(x_ref.at[at], x, mask=mask)
    store_normed(x, scale, out_ref, at, mask, eps)


def _places(out_ref, block: int):
    """This program's row and columns, and which of them there are if not all."""
    columns = jnp.arange(block)
    at = jnp.full((block,), pl.program_id(0)), columns
    return at, None if block == out_ref.shape[1] else columns < out_ref.shape[1]


def _load(ref, at, mask):
    return plt.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


def load_scale(scale_ref, at, mask):
    """The scale of the columns of a place."""
    return _load(scale_ref, at[1:], mask)


def store_normed(x, scale, out_ref, at, mask, eps: float):
    x = x.astype(jnp.float32)
    rms = lax.rsqrt(sum_in_pairs(x * x) / out_ref.shape[1] + eps)
    # Rounded where RMSNorm rounds: after the division, and after the scale.
    out = scale * (x * rms).astype(scale.dtype)
    plt.store(out_ref.at[at], out.astype(out_ref.dtype), mask=mask)
