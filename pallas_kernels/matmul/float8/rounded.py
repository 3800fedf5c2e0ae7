"""Numbers rounded to e4m3, and what they stand for: a row's codes times the row's float32 scale.

A weight's rows here are its columns, so that a tensor core finds both of a product's operands as it
wants them. A scale takes the largest number of its row to 448, the largest of e4m3.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

DTYPE, LARGEST = jnp.float8_e4m3fn, 448.0


class Rounded(NamedTuple):
    """Of rows x [M, K] or of a weight [K, N]; in a kernel the fields are references."""

    codes: Float[Array, "R K"]  # R is M or N
    scales: Float[Array, " R"]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        rows, K = self.codes.shape
        return K, rows


def rounded_rows(x: Float[Array, "R K"], dtype: DTypeLike = jnp.float32) -> Rounded:
    """Codes and scales of each row, the scales as numbers of `dtype`; the scale of zeros is 1.

    A scale that was rounded down to bfloat16 takes a row's largest number to at most 449.75, which
    is rounded to 448.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    scales = jnp.where(largest > 0, largest / LARGEST, 1.0).astype(dtype)
    return Rounded((wide / scales[:, None].astype(jnp.float32)).astype(DTYPE), scales)


def rounded_weight(w: Float[Array, "K N"], dtype: DTypeLike = jnp.float32) -> Rounded:
    return rounded_rows(w.T, dtype)
