"""Block attention as two einsums that XLA compiles for any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
) -> Float[Array, "B T N H"]:
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    in_block = jnp.arange(S)[None, :] - lengths[:, None]  # [B, S]
    used = in_block < widths[:, None]
    visible = jnp.broadcast_to(used[:, None, :], (B, T, S))
    if causal:
        visible &= in_block[:, None, :] <= jnp.arange(T)[None, :, None]
    grouped = q.reshape(B, T, K, N // K, H)
    # Every slot is summed over, dead ones with weight exactly 0: so the order of the sum, and with
    # it a row's bits, depends neither on the length nor on the row's place in the block.
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", grouped, k, precision="highest", preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[:, None, None], scores * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    live = jnp.where(used[:, :, None, None], v, 0)
    out = jnp.einsum(
        "BKGTS,BSKH->BTKGH", weights, live, precision="highest", preferred_element_type=jnp.float32
    )
    return out.reshape(B, T, N, H).astype(q.dtype)
