"""Block attention as two einsums that XLA compiles for any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
) -> Float[Array, "B T N H"]:
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    used, visible = masks(lengths, widths, T, S, causal, window, ring)
    grouped = q.reshape(B, T, K, N // K, H)
    # Every slot is summed over, dead ones with weight exactly 0: so the order of the sum, and with
    # it a row's bits, depends neither on the length nor on the row's place in the block.
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", grouped, k, precision="highest", preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = visible[:, None, None]
    weights = masked_softmax(scores, seen, None if sinks is None else sinks.reshape(K, N // K))
    live = jnp.where(used[:, :, None, None], v, 0)
    out = jnp.einsum(
        "BKGTS,BSKH->BTKGH", weights.astype(v.dtype), live,
        precision="highest", preferred_element_type=jnp.float32,
    )  # fmt: skip
    return out.reshape(B, T, N, H).astype(q.dtype)


def masks(
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    T: int,
    S: int,
    causal: bool,
    window: int | None,
    ring: bool = False,
) -> tuple[Bool[Array, "B S"], Bool[Array, "B T S"]]:
    """The slots that some query may see, and those that each does."""
    in_block = jnp.arange(S)[None, :] - lengths[:, None]  # [B, S]
    if ring:  # the last position below the block's end that lies at each slot
        in_block = T - 1 - (T - 1 - in_block) % S
    used = in_block < widths[:, None]
    if ring:
        used &= in_block >= -lengths[:, None]  # none lies there yet
    ahead = in_block[:, None, :] - jnp.arange(T)[None, :, None]  # slot minus query
    if window is not None:
        used &= in_block > -window
    visible = jnp.broadcast_to(used[:, None, :], (lengths.shape[0], T, S))
    if causal:
        visible &= ahead <= 0
    if window is not None:
        visible &= ahead > -window
        if not causal:
            visible &= ahead < window
    return used, visible


def masked_softmax(
    scores: Float[Array, "B K G T S"],
    visible: Bool[Array, "B 1 1 T S"],
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "B K G T S"]:
    """Weights of the visible slots; all 0 where there is none."""
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32)[None, :, :, None, None]
        top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
        unscaled = jnp.exp(scores - top)
        weights = unscaled / (jnp.sum(unscaled, axis=-1, keepdims=True) + jnp.exp(sink - top))
    return jnp.where(visible, weights, 0)  # a row that sees nothing is NaN up to here
