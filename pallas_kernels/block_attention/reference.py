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
) -> Float[Array, "B T N H"]:
    groups = q.shape[2] // k.shape[2]

    def one_head(q, k, v, length, width):  # [T, H], [S, H], [S, H], scalars
        query = jnp.arange(q.shape[0])[:, None]
        in_block = jnp.arange(k.shape[0])[None, :] - length
        visible = (in_block < 0) | ((in_block < width) & ((in_block <= query) | (not causal)))
        scores = jnp.where(visible, jnp.matmul(q, k.T, precision="highest") * scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        # A hidden slot may hold NaN, and 0 * NaN is NaN: take its value out as well.
        used = jnp.where(visible[:, :, None], v[None], 0.0)
        return jnp.sum(weights[:, :, None] * used, axis=1)

    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    heads = jax.vmap(one_head, in_axes=(1, 1, 1, None, None), out_axes=1)
    out = jax.vmap(heads)(
        q32, jnp.repeat(k32, groups, axis=2), jnp.repeat(v32, groups, axis=2), lengths, widths
    )
    return out.astype(q.dtype)
