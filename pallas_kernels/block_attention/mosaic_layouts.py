"""How the tensor cores' values lie in registers and in shared memory, for block attention."""

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = LAYOUT.reduce(1)
# pyright: reportAbstractUsage=false
SWIZZLED_ROWS = 8
SWIZZLED = (plgpu.TilingTransform((SWIZZLED_ROWS, 64)), plgpu.SwizzleTransform(128))


def across(per_row, like):
    """[ROWS] to the shape of `like` [ROWS, …]."""
    return lax.broadcast_in_dim(per_row, like.shape, [0])
