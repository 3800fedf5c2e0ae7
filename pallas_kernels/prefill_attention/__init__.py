"""Attention of one prompt chunk against the cache it extends: the contract and its entry point.

Axes: B batch, C chunk tokens, S cache slots, N query heads, K KV heads, H head dim.
The chunk's own keys and values already lie at slots offset … offset + C - 1. Query i sees slots
0 … offset + i (causal, aligned at the bottom right); later slots are invisible whatever they hold.
Scores and softmax are float32, the result has q's dtype.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.prefill_attention import reference, xla

BACKENDS = {"reference": reference.prefill_attention, "xla": xla.prefill_attention}


def prefill_attention(
    q: Float[Array, "B C N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    offset: Int[Array, ""],
    *,
    scale: float,
    backend: str,
) -> Float[Array, "B C N H"]:
    """See the module's contract. `backend` is one of BACKENDS; any other name is a ValueError."""
    if backend not in BACKENDS:
        raise ValueError(f"prefill attention has no backend {backend!r}: use {sorted(BACKENDS)}")
    return BACKENDS[backend](q, k, v, offset, scale=scale)
