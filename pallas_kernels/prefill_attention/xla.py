"""Prefill attention by XLA: the block's two einsums, with the chunk as a full causal block."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import xla


def prefill_attention(
    q: Float[Array, "B C N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    offset: Int[Array, ""],
    *,
    scale: float,
) -> Float[Array, "B C N H"]:
    lengths = jnp.full(q.shape[:1], offset)
    widths = jnp.full(q.shape[:1], q.shape[1])
    return xla.block_attention(q, k, v, lengths, widths, causal=True, scale=scale)
