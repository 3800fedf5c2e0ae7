"""The newest rows of the convolution: position p at place p % R, for backends without a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.grid import Span


def with_earlier(
    ring: Float[Array, "S R D"], raw: Float[Array, "B T D"], span: Span, taps: int
) -> Float[Array, "B _ D"]:
    """The taps - 1 rows before the start, zeros before position 0, and the real rows after them."""
    before = span.start[:, None] + jnp.arange(1 - taps, 0)
    tail = ring[span.places[:, None], before % ring.shape[1]]
    tail = jnp.where((before >= 0)[:, :, None], tail, 0)
    padding = (jnp.arange(raw.shape[1]) >= span.real[:, None])[:, :, None]
    return jnp.concatenate([tail, jnp.where(padding, 0, raw)], axis=1)  # padding must be finite


def put(
    ring: Float[Array, "S R D"], raw: Float[Array, "B T D"], span: Span
) -> Float[Array, "S R D"]:
    """The ring with the newest of the real rows."""
    row, places, real = jnp.arange(raw.shape[1]), ring.shape[1], span.real[:, None]
    stays = (row < real) & (row >= real - places)
    at = jnp.where(stays, (span.start[:, None] + row) % places, places + row)
    return ring.at[span.places[:, None], at].set(raw, mode="drop", unique_indices=True)
