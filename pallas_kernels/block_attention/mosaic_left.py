"""What a kernel leaves in memory for another: the sums of pieces, see `pieces`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_attention.mosaic_task import ROWS, Task


class Left(NamedTuple):
    """In float32, of a row tile of each KV head."""

    sums: Any  # [*places, K, tiles, ROWS, H]
    scales: Any  # [*places, K, tiles, ROWS]
    weights: Any


def left_types(task: Task, *places: int) -> Left:
    shape = (*places, task.K, task.row_tiles, ROWS)
    row = jax.ShapeDtypeStruct(shape, jnp.float32)
    return Left(jax.ShapeDtypeStruct((*shape, task.H), jnp.float32), row, row)


def leave(left: Left, place, columns, piece) -> None:
    """Writes some columns of a piece's sums, and by the CTA of the first ones its rows."""
    sums, scales, weights = piece
    left.sums[(*place, slice(None), columns)] = sums

    @pl.when(columns.start == 0)
    def leave_rows():
        left.scales[place] = scales
        left.weights[place] = weights
