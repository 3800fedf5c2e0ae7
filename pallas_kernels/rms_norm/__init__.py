"""RMSNorm: x / rms(x) over the last axis in float32, rounded to scale's dtype, times scale.

The result has x's dtype. That is transformers' order, where a scale of float32 is one whose product
is rounded once (Qwen3.5, whose scales are 1 + w). "cpu" and "canonical" promise that a row's bits
depend only on that row, whatever the other axes are and whatever the norm is compiled beside.
"xla" and "reference" (one and the same: short jnp) promise it inside one program. "canonical" is
for Hopper and x of bfloat16.

`after` norms the sum that a product left unmade (`pallas_kernels.matmul.unsummed`), or a layer of
experts (`grouped_matmul.sums`), and gives the sum too; both have the bits that the sum by its own
kernel and the norm by itself give.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.choice import backend_of, device_refusal
from pallas_kernels.grouped_matmul.sums import Weighed, weighed_sum
from pallas_kernels.rms_norm import canonical, cpu, reference
from pallas_kernels.rms_norm.after_experts import after_experts
from pallas_kernels.unsummed import Unsummed, summed

BACKENDS = {"canonical": canonical, "cpu": cpu, "xla": reference, "reference": reference}


class Sizes(NamedTuple):
    """What a backend must be able to take."""

    features: int
    dtype: Any


def rms_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, " D"], eps: float, *, backend: str
) -> Float[Array, "*lead D"]:
    """See the module's contract. `backend` is one of BACKENDS; any other name is a ValueError."""
    return backend_of("norm", backend, BACKENDS).rms_norm(x, scale, eps)


def after(
    sums: Unsummed | Weighed, scale: Float[Array, " D"], eps: float, *, backend: str
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"]]:
    """The sum that was left unmade, and its norm; `backend` as of `rms_norm`."""
    if isinstance(sums, Weighed):
        if backend == "canonical":
            return after_experts(sums, scale, eps)
        x = weighed_sum(sums)
        return x, rms_norm(x, scale, eps, backend=backend)
    if backend == "canonical" and sums.pieces is not None and sums.residual is not None:
        return canonical.after(sums, scale, eps)
    x = summed(sums)
    return x, rms_norm(x, scale, eps, backend=backend)


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    if backend == "cpu":
        return device_refusal("cpu", device)
    if backend != "canonical":
        return None
    dtype = jnp.dtype(sizes.dtype).name
    if dtype != "bfloat16":
        return f"has only bfloat16, not {dtype}"
    return device_refusal("mosaic_gpu", device)
