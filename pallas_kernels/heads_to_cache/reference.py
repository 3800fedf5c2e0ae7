"""Head norms, RoPE and the cache write in plain jnp: right by inspection, and what XLA compiles."""

import jax.numpy as jnp

from pallas_kernels.rms_norm.reference import rms_norm as reference_norm


def rotate(x, cos, sin):
    """Rotates halves of each head [B, T, _, H] by angles [B, T, H/2], in float32."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def split_heads(
    x, q_scale, k_scale, cos, sin, heads, dtype, rms_norm=reference_norm, rotate=rotate
):
    """q [B, T, N, H], k and v [B, T, K, H] of the projection, normed and rotated."""
    B, T = cos.shape[:2]
    x = x[0] if len(x) == 1 else jnp.sum(x, axis=0).astype(dtype)
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    q, k, v = (
        x[:, :, first : first + count * H].reshape(B, T, count, H)
        for first, count in zip(heads.firsts, (N, K, K), strict=True)
    )
    if q_scale is not None:
        q = rms_norm(q, q_scale, heads.eps)
    if k_scale is not None:
        k = rms_norm(k, k_scale, heads.eps)
    if heads.value_norm:
        v = rms_norm(v, jnp.ones(H), heads.eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def heads_to_cache(
    x, q_scale, k_scale, cos, sin, k, v, slots, *, heads, rising=True, split=split_heads
):
    q, new_k, new_v = split(x, q_scale, k_scale, cos, sin, heads, k.dtype)
    own = jnp.minimum(jnp.arange(len(slots)), len(k) - 1)  # or the one that all share
    index = (own[:, None], slots)

    def put(rows, new):
        return rows.at[index].set(new, mode="drop", unique_indices=True, indices_are_sorted=rising)

    return q, put(k, new_k), put(v, new_v)
