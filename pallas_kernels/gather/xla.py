"""XLA's gather, which NCCL does on NVIDIA GPUs."""

from jax import lax
from jaxtyping import Array, Num


def gather(x: Num[Array, "*lead _"], axis: str) -> Num[Array, "*lead _"]:
    """See the folder's contract."""
    return lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
