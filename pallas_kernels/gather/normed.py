"""A push of many rows that are added to a residual and normed by the kernel that waits for them.

The sum of a device's pieces goes by copies in bulk to its peers' landing places and its own, and
the warpgroup that sent this device's part of a row reads it there, whole. So nothing is laid side
by side, and three kernels are one. The landing places, their turns and counts are those of `push`,
and so is why no device is two gathers ahead. No bit is another than by `push.gather` of the sum,
and `rms_norm.after` it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.gather import push
from pallas_kernels.gather.counts import say, wait
from pallas_kernels.gather.part import THREADS, Part, layout
from pallas_kernels.gather.squares import inverse_rms, room

WARPGROUPS = 4  # of a CTA, each with rows of its own
# Rows. Fewer gain nothing: on two H200s a push and a norm of 192 and 256 rows of 4,096 took 16.7
# and 18.0 µs in a loop, and by one kernel 22.1 and 20.9; of 384, 512 and 1,000 rows 21.1, 23.8 and
# 42.1, and 19.2, 21.5 and 33.2 (benchmarks/h200-x2-norms.json, with 16 rows by lines).
FEWEST, MOST = 384, 2 * WARPGROUPS * push.CTAS
# Over four, 512 rows took 30.3 and 30.6 µs, and a step with them 9.37 and 9.43 ms; what it gains is
# that the product before can be split: 9.14 (benchmarks/h200-x4-norms.json).
DEVICES = (2, 4)
VECTORS = (8, 4, 2)  # numbers of a thread that lie side by side: the most that one copy has
MOST_PARTS = 20  # of a row, which a warpgroup has in registers


class Row(NamedTuple):
    """References to what rows are made of, and to what they make."""

    residual: Any
    scale: Any
    sum: Any
    normed: Any
    eps: float


def length(M: int, C: int, devices: int) -> int | None:
    """Columns of the parts in which a warpgroup has a row; None if M rows of C columns of each
    device are not for this way."""
    if devices not in DEVICES or not FEWEST <= M <= min(MOST, push.MOST // C):
        return None
    fitting = (THREADS * numbers for numbers in VECTORS)
    return next((n for n in fitting if C % n == 0 and devices * C // n <= MOST_PARTS), None)


def gather_normed(
    own: Float[Array, "*P M C"],
    residual: BFloat16[Array, "M D"],
    scale: Float[Array, " D"],
    eps: float,
    places: push.Places,
    axis: str,
) -> tuple[BFloat16[Array, "M D"], BFloat16[Array, "M D"]]:
    """The residual plus all devices' rows, and its norm. `own` is this device's part of them, in
    float32 pieces or one that is rounded already, of a size that has a `length`."""
    return _gather(own, residual, scale, places.landing, places.counts, axis, eps)


# One inner jit: all norms of a model after a gather share one compiled kernel.
@functools.partial(jax.jit, static_argnums=(5, 6))
def _gather(own, residual, scale, landing, counts, axis: str, eps: float):
    (M, D), C = residual.shape, own.shape[-1]
    columns = length(M, C, D // C)
    assert columns is not None
    like = jax.ShapeDtypeStruct((M, D), residual.dtype)
    rows = -(-M // (WARPGROUPS * push.CTAS))  # of a warpgroup
    return plgpu.kernel(
        functools.partial(_kernel, axis=axis, eps=eps, length=columns),
        out_type=(like, like),
        scratch_types={
            "staged": plgpu.SMEM((WARPGROUPS, rows, C), residual.dtype),
            "held": room(WARPGROUPS * rows, D // columns),
            "all_sent": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        grid=(push.CTAS,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
        kernel_name="push_and_norm",
    )(own, residual, scale, landing, counts)


def _kernel(
    own, residual, scale, landing, counts, sum_ref, out, *, axis: str, eps: float, length: int,
    staged, held, all_sent,
):  # fmt: skip
    part, _tiles, turn = push.task(own, landing, counts, sum_ref, axis, length)
    row, devices = Row(residual, scale, sum_ref, out, eps), counts.shape[0] - 1
    wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
    M, rows = own.shape[-2], staged.shape[1]
    at = [cta + (wg + WARPGROUPS * i) * push.CTAS for i in range(rows)]

    for i in range(rows):
        pl.when(at[i] < M)(functools.partial(_send, part, at[i], staged.at[wg, i]))
    plgpu.wait_smem_to_gmem(0)  # copies are not ordered with what is said after them
    plgpu.barrier_arrive(all_sent)

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(all_sent)
        said = counts.at[part.me, cta]
        say([plgpu.remote_ref(said, peer) for peer in part.peers], turn + 1)

    def take(r: Any, held: Any):
        before = _before(row, r, length)
        for peer in part.peers:
            wait(counts.at[peer, cta], turn + 1, most=1)  # that peer may be a gather ahead
        tiles = [r * part.across + i for i in range(part.across)]
        places = [part.place(device, tile) for device in range(devices) for tile in tiles]
        there = [plgpu.load(part.landing.at[at], layout=layout(length)) for at in places]
        _finish(row, r, before, there, held)

    for i in range(rows):
        pl.when(at[i] < M)(functools.partial(take, at[i], held.at[wg * rows + i]))

    @pl.when(wg == 0)  # all have read it by now
    def _():
        counts[devices, cta] = turn + 1


def _send(part: Part, row: Any, staged: Any) -> None:
    """Copies this device's part of a row to all devices, by way of shared memory."""
    for i in range(part.across):
        columns = pl.ds(i * part.length, part.length)
        staged[columns] = part.value(row * part.across + i)
    plgpu.commit_smem()
    place = part.landing.at[part.slot, part.me, pl.ds(row * staged.shape[0], staged.shape[0])]
    for peer in part.peers:
        plgpu.copy_smem_to_gmem(staged, plgpu.remote_ref(place, peer))
    plgpu.copy_smem_to_gmem(staged, place)


def _before(row: Row, r: Any, length: int) -> list[Any]:
    """Row `r` of the residual in parts, which is read while others send."""
    places = (pl.ds(first, length) for first in range(0, row.residual.shape[1], length))
    return [plgpu.load(row.residual.at[r, at], layout=layout(length)) for at in places]


def _finish(row: Row, r: Any, before: list[Any], gathered: list[Any], held: Any) -> None:
    """Adds and norms the parts of a row as `rms_norm`'s kernel does."""
    length, dtype = before[0].shape[0], row.sum.dtype
    places = [pl.ds(i * length, length) for i in range(len(before))]
    both = zip(before, gathered, strict=True)
    sums = [(x.astype(jnp.float32) + y.astype(jnp.float32)).astype(dtype) for x, y in both]
    inverse = inverse_rms([x.astype(jnp.float32) for x in sums], held, row.eps)
    for at, x in zip(places, sums, strict=True):
        scale = plgpu.load(row.scale.at[at], layout=layout(length))
        row.sum[r, at] = x
        normed = scale * (x.astype(jnp.float32) * inverse).astype(scale.dtype)
        row.normed[r, at] = normed.astype(dtype)
