"""RMSNorm: x / rms(x) over the last axis in float32, rounded to x's dtype, times scale.

That is transformers' order. "cpu" promises that a row's bits depend on that row alone, whatever the
other axes are and whatever the norm is compiled beside. "xla" and "reference" (one and the same:
short jnp) promise it inside one program.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.choice import device_refusal, no_backend
from pallas_kernels.rms_norm import cpu, reference

BACKENDS = {"cpu": cpu, "xla": reference, "reference": reference}


class Sizes(NamedTuple):
    """What a backend must be able to take."""

    features: int


def rms_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, " D"], eps: float, *, backend: str
) -> Float[Array, "*lead D"]:
    """See the module's contract. `backend` is one of BACKENDS; any other name is a ValueError."""
    if backend not in BACKENDS:
        raise ValueError(no_backend("norm", backend, BACKENDS))
    return BACKENDS[backend].rms_norm(x, scale, eps)


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    return device_refusal("cpu", device) if backend == "cpu" else None
