"""What Pallas-Triton kernels share: references to a matrix inside a larger array."""

import jax.numpy as jnp


def grid(ref, rows, columns, *lead):
    """[rows, columns] of the matrix at `lead` (an expert; a piece and a sequence)."""
    shape = (rows.size, columns.size)
    return ref.at[
        (
            *(jnp.full(shape, i) for i in lead),
            jnp.broadcast_to(rows[:, None], shape),
            jnp.broadcast_to(columns[None, :], shape),
        )
    ]
