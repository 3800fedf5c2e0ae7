"""Attention of a speculative block against a cache: the contract and its one entry point.

Axes: B batch, T query tokens, S cache slots, N query heads, K KV heads, H head dim.
The block's own keys and values already lie in the cache, at slots lengths[b] … lengths[b] + T - 1.
Query i of sequence b sees
- every slot below lengths[b] (its context), and
- slot lengths[b] + j of the block when j < widths[b] and, if causal, also j <= i.
Everything else is invisible whatever it holds, NaN included. Rows i >= widths[b] are padding:
finite, of no meaning. Query head n reads KV head n // (N / K). Scores and softmax are float32,
the result has q's dtype.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import reference, xla

BACKENDS = {"reference": reference.block_attention, "xla": xla.block_attention}


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    backend: str,
) -> Float[Array, "B T N H"]:
    """See the module's contract. `backend` is one of BACKENDS; any other name is a ValueError."""
    if backend not in BACKENDS:
        raise ValueError(f"block attention has no backend {backend!r}: use {sorted(BACKENDS)}")
    return BACKENDS[backend](q, k, v, lengths, widths, causal=causal, scale=scale)
