"""What a layer leaves to the norm after it: a sum that one kernel has not made.

Where devices share the layer, each may have its own columns of what is to be added: then the norm's
kernel gathers them on its way.
Axes: P pieces, D width, C columns of a device.
"""

import math
from typing import NamedTuple

from jaxtyping import Array, Float

from jflash.layers.gather import gather_normed, gather_sum, norms
from pallas_kernels.grouped_matmul.sums import Weighed, weighed_sum
from pallas_kernels.matmul import Unsummed, unadded
from pallas_kernels.matmul import summed as sum_of
from pallas_kernels.rms_norm import after

BACKEND = "canonical"  # of the products whose sums are gathered by a norm's kernel, and of the norm


class Ungathered(NamedTuple):
    """This device's columns of a product, [P, *lead, C] or [*lead, C], and the whole residual."""

    own: Unsummed
    residual: Float[Array, "*lead D"]
    shards: int

    def gathered(self) -> Unsummed:
        """The whole product beside the residual."""
        return unadded(gather_sum(self.own, self.shards), self.residual, backend=BACKEND)


Sums = Unsummed | Ungathered | Weighed


def left(
    own: Unsummed, residual: Float[Array, "*lead D"] | None, shards: int, backend: str
) -> Sums:
    """Of this device's columns of a product and the residual what a norm makes the sum of."""
    if residual is not None and backend == BACKEND:
        *lead, width = residual.shape
        if norms(math.prod(lead), width // shards, shards):
            return Ungathered(own, residual, shards)
    return unadded(gather_sum(own, shards), residual, backend=backend)


def summed(sums: Sums) -> Float[Array, "*lead D"]:
    """The sum by itself."""
    if isinstance(sums, Weighed):
        return weighed_sum(sums)
    return sum_of(sums.gathered() if isinstance(sums, Ungathered) else sums)


def normed(
    sums: Sums, scale: Float[Array, " D"], eps: float, backend: str
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"]]:
    """The sum, and its RMSNorm."""
    if not isinstance(sums, Ungathered):
        return after(sums, scale, eps, backend=backend)
    if backend == BACKEND:
        return gather_normed(sums.own, sums.residual, scale, eps)
    return after(sums.gathered(), scale, eps, backend=backend)
