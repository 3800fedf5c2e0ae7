"""The newest rows of the convolution: position p at place p % R, for backends without a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def with_earlier(
    ring: Float[Array, "B R D"],
    raw: Float[Array, "B T D"],
    start: Int[Array, " B"],
    real: Int[Array, " B"],
    taps: int,
) -> Float[Array, "B _ D"]:
    """The taps - 1 rows before `start`, zeros before position 0, and the real rows after them."""
    sequence = jnp.arange(len(start))[:, None]
    before = start[:, None] + jnp.arange(1 - taps, 0)
    tail = ring[sequence, before % ring.shape[1]]
    tail = jnp.where((before >= 0)[:, :, None], tail, 0)
    padding = (jnp.arange(raw.shape[1]) >= real[:, None])[:, :, None]
    return jnp.concatenate([tail, jnp.where(padding, 0, raw)], axis=1)  # padding must be finite


def put(
    ring: Float[Array, "B R D"],
    raw: Float[Array, "B T D"],
    start: Int[Array, " B"],
    real: Int[Array, " B"],
) -> Float[Array, "B R D"]:
    """The ring with the newest of the real rows."""
    sequence, row, places = jnp.arange(len(start))[:, None], jnp.arange(raw.shape[1]), ring.shape[1]
    stays = (row < real[:, None]) & (row >= real[:, None] - places)
    at = jnp.where(stays, (start[:, None] + row) % places, places + row)
    return ring.at[sequence, at].set(raw, mode="drop", unique_indices=True)
