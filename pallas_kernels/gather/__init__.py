"""Gather: the last axis of a mesh axis' devices, side by side in their order, on every device.

Numbers are moved and none is added, so backends agree in every bit. "xla" is `lax.all_gather`.
"push" is for NVIDIA GPUs of one host that write to each other's memory: a kernel writes its
device's part to the places of all peers, and waits for theirs. It needs `Places` on every device,
which all calls of all programs share in turn, and a part that fits them; larger ones go to XLA.
A kernel may also push what it makes and read it where it landed (`blocks`), without this op.
Programs that push must run in one order on all devices, as those with XLA's collectives must.
Axes: n devices, M rows, C columns of a device.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_kernels.choice import device_refusal
from pallas_kernels.gather import normed, push, xla
from pallas_kernels.gather.push import Places as Places
from pallas_kernels.gather.push import empty_places as empty_places
from pallas_kernels.unsummed import Unsummed, summed

BACKENDS = {"push": push, "xla": xla}  # the better first


class Sizes(NamedTuple):
    """What a backend must be able to take."""

    devices: int


def gather(
    x: Num[Array, "*lead _"], axis: str, places: Places | None = None
) -> Num[Array, "*lead _"]:
    """Pushed to `places`, which are references, if there are some and a part fits; else by XLA."""
    if places is None:
        return xla.gather(x, axis)
    *lead, C = x.shape
    M, each = math.prod(lead), x.dtype.itemsize // 2  # bfloat16s of a number
    padded = -(-C * each // push.LEAST) * push.LEAST
    if not each or M * padded > push.MOST:
        return xla.gather(x, axis)
    if x.dtype == jnp.bfloat16 and push.rows_of_tile(M, C) is not None:
        return push.gather(x.reshape(M, C), places, axis).reshape(*lead, -1)
    # As whole numbers while they are cut and filled up: no compiler then rounds what is no number.
    halves = lax.bitcast_convert_type(x.reshape(M, C), jnp.uint16).reshape(M, -1)
    halves = jnp.pad(halves, ((0, 0), (0, padded - C * each)))
    parts = push.gather(lax.bitcast_convert_type(halves, jnp.bfloat16), places, axis)
    halves = lax.bitcast_convert_type(parts, jnp.uint16).reshape(M, -1, padded)[..., : C * each]
    halves = halves.reshape(M, -1, C, each) if each > 1 else halves
    return lax.bitcast_convert_type(halves, x.dtype).reshape(*lead, -1)


def gather_sum(
    pieces: Float[Array, "P *lead _"], axis: str, places: Places | None = None
) -> Float[Array, "*lead _"]:
    """`gather` of a product that is in pieces (`matmul.unsummed`): a push of few rows adds them up
    on its way. The sum is bfloat16's, and has the bits of `matmul.summed`."""
    _, *lead, C = pieces.shape
    M = math.prod(lead)
    if places is None or not push.adds(M, C):
        return gather(summed(Unsummed(pieces, None)), axis, places)
    return push.gather_sum(pieces.reshape(-1, M, C), places, axis).reshape(*lead, -1)


def norms(M: int, C: int, devices: int) -> bool:
    """Whether `gather_normed` takes parts of such sizes, of bfloat16, if they are pushed."""
    return normed.length(M, C, devices) is not None


def gather_normed(
    own: Float[Array, "*P_lead C"],
    residual: Float[Array, "*lead D"],
    scale: Float[Array, " D"],
    eps: float,
    axis: str,
    places: Places | None,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"]]:
    """The residual plus all devices' parts, and its norm: pushed, added and normed by one kernel.

    `own` is in pieces of float32, or rounded already. The bits are those of `gather_sum`, and of
    `rms_norm.after` it by "canonical".
    """
    assert places is not None
    C, D = own.shape[-1], residual.shape[-1]
    flat = residual.reshape(-1, D)
    pieces = own.shape[: own.ndim - residual.ndim]
    given = own.reshape(*pieces, len(flat), C)
    found = normed.gather_normed(given, flat, scale, eps, places, axis)
    return found[0].reshape(residual.shape), found[1].reshape(residual.shape)


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    if backend != "push":
        return None
    if sizes.devices == 1:
        return "is for several devices, and this is one"
    return device_refusal("mosaic_gpu", device)
