"""What CPU forms share: sums and products whose bits no shape and no fusion can change.

XLA's CPU compiler sums a row in an order that depends on how many rows there are, and joins a
product and the sum that follows it into one rounding wherever both land in one loop. The inside of
exp begins with such a product.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def row_sum(x: Float[Array, "*lead D"]) -> Float[Array, "*lead 1"]:
    """Σ over the last axis, whose first half is added to its second until one entry is left."""
    size = x.shape[-1]
    half = 1 << (size - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, half - size)])
    while half > 1:
        half //= 2
        x = x[..., :half] + x[..., half:]
    return x


def rounded[T](products: T) -> T:
    """The same numbers, each rounded before anything is added to it."""
    return lax.optimization_barrier(products)
