"""Block attention, right by inspection: float32, one sequence and one head at a time."""

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
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
) -> Float[Array, "B T N H"]:
    groups = q.shape[2] // k.shape[2]

    def one_head(q, k, v, sink, length, width):  # [T, H], [S, H], [S, H], scalars
        query = jnp.arange(q.shape[0])[:, None]
        position = jnp.arange(k.shape[0])
        if ring:  # the last one below the block's end that lies at this slot
            newest = length + q.shape[0] - 1
            position = newest - (newest - position) % k.shape[0]
        in_block = position[None, :] - length
        visible = (in_block < 0) | ((in_block < width) & ((in_block <= query) | (not causal)))
        if window is not None:
            visible &= query - in_block < window
            visible &= (in_block - query < window) | causal
        visible &= position[None, :] >= 0
        scores = jnp.matmul(q, k.T, precision="highest") * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible, scores, -jnp.inf)
        logits = jnp.concatenate([scores, jnp.full((q.shape[0], 1), sink)], axis=1)
        weights = jax.nn.softmax(logits, axis=-1)[:, :-1]
        # A slot that no row sees may hold NaN, and 0 * NaN is NaN: take its value out as well. So
        # is the weight of a row that sees nothing, not even a sink.
        values = jnp.where(jnp.any(visible, axis=0)[:, None], v, 0.0)
        return jnp.matmul(jnp.where(visible, weights, 0.0), values, precision="highest")

    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    k32, v32 = (jnp.repeat(x, groups, axis=2) for x in (k32, v32))
    # No sink is a logit of -inf.
    sinks = jnp.full(q.shape[2], -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    heads = jax.vmap(one_head, in_axes=(1, 1, 1, 0, None, None), out_axes=1)
    batch = jax.vmap(heads, in_axes=(0, 0, 0, None, 0, 0))
    return batch(q32, k32, v32, sinks, lengths, widths).astype(q.dtype)
