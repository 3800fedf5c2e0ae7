"""A gate and an up in pairs, of few rows, by CTAs of one warpgroup that loads for itself.

A multiprocessor then has several such CTAs, whose conversions and sums overlap, and three times as
many tiles as multiprocessors leave few of them idle at the end. The form is `mosaic`'s, and
`canonical` takes this kernel where it was the faster one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.matmul.kept import mosaic, pairs
from pallas_kernels.matmul.kept.fragments import COLUMNS, DEPTH, ROW, Fragments
from pallas_kernels.matmul.mosaic_kernel import tiled

# By bits of a code. µs of a gate and up [4096, 24576] by `mosaic` and by this kernel, in steps
# on an H200 (jax 0.11.2, 2026-11-25): INT4 24.0 and 19.3 at 1 row, 23.9 and 19.4 at 8, 25.7 and
# 19.9 at 16; FP8 30.6 and 29.1, 30.4 and 28.1, and 31.5 and 34.8, when two CTAs fill the memory.
MOST_ROWS = {4: 16, 8: 8}
MOST_NARROW = 16  # rows of narrow FP8, with smaller slots: a step takes 4.10 ms, and 4.14 without
SLOTS = 3, 2  # of the ring, and tiles along K in each
SMALL_SLOTS = 4, 1


def takes(w: Fragments, rows: int) -> bool:
    """Whether this kernel was the faster one."""
    return w.paired and rows <= (MOST_NARROW if w.narrow else MOST_ROWS[w.bits])


def _slots(w: Fragments, rows: int) -> tuple[int, int]:
    return SLOTS if rows <= MOST_ROWS[w.bits] else SMALL_SLOTS


def gated(x: Float[Array, "M K"], w: Fragments) -> Float[Array, "M F"]:
    """As `mosaic.product` of paired columns."""
    M, K = x.shape
    if M > 8 and M % 8:
        return gated(jnp.pad(x, ((0, -M % 8), (0, 0))), w)[:M]
    assert takes(w, M), (w, M)
    rows, (slots, deep) = -(-M // 8) * 8, _slots(w, M)
    deep = deep if K % (deep * DEPTH) == 0 else 1
    steps = K // DEPTH // deep
    stages = min(slots, steps)
    launch = plgpu.kernel(
        functools.partial(_kernel, w=jax.tree.map(lambda a: None, w), steps=steps),
        out_type=jax.ShapeDtypeStruct((M, w.shape[1] // 2), x.dtype),
        scratch_types={
            "ring": plgpu.SMEM((stages, deep, w.words.shape[-2], ROW), jnp.uint32),
            "x_ring": plgpu.SMEM((stages, rows, DEPTH * deep), x.dtype, transforms=tiled(128, 2)),
            "out_smem": plgpu.SMEM((rows, pairs.OWN), x.dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(w.shape[1] // COLUMNS,),
        grid_names=("column",),
        kernel_name="kept_gate_up",
    )
    return launch(x, w.words)


def _kernel(
    x_gmem, w_gmem, out_gmem, *, ring, x_ring, out_smem, full, w: Fragments, steps: int
):  # fmt: skip
    column, (stages, deep) = lax.axis_index("column"), ring.shape[:2]
    rows = x_ring.shape[1]

    def load(step):
        slot = lax.rem(step, stages)
        plgpu.copy_gmem_to_smem(
            w_gmem.at[column, pl.ds(step * deep, deep)], ring.at[slot], full.at[slot]
        )
        plgpu.copy_gmem_to_smem(
            x_gmem.at[pl.ds(0, rows), pl.ds(step * deep * DEPTH, deep * DEPTH)],
            x_ring.at[slot], full.at[slot],
        )  # fmt: skip

    pl.loop(0, stages)(load)

    def sums(acc):
        @pl.loop(0, steps)
        def _(step):
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(full.at[slot])
            for k in range(deep):
                numbers = mosaic.converted(ring.at[slot, k], w)
                of_rows = x_ring.at[slot, slice(None), pl.ds(k * DEPTH, DEPTH)]
                plgpu.wgmma(acc, numbers, of_rows.transpose((1, 0)))
            plgpu.wgmma_wait(0)

            @pl.when(step + stages < steps)
            def _():
                plgpu.commit_smem()  # all threads have read the slot
                load(step + stages)

        return acc[...]

    value = pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef((COLUMNS, rows)))
    pairs.store_gated(out_smem, value)
    plgpu.commit_smem()
    target = out_gmem.at[pl.ds(0, rows), pl.ds(column * pairs.OWN, pairs.OWN)]
    plgpu.copy_smem_to_gmem(out_smem, target)
    plgpu.wait_smem_to_gmem(0)
