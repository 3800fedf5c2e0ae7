"""Canonical products of few rows with a long K and few columns, on Hopper: y^T = W^T x^T.

Where 64 columns and a piece of K make few programs, each reads much, one step after another.
Pallas-Triton's are held, it seems, by the threads that ask for each step's weights, before a
multiprocessor's way to the L2 cache would hold them. Here a producer's copies fill a ring of shared
memory, and wgmma takes both operands there: W's columns are its rows, so no row of x is padded to
64. It sums K in the canonical order, and no bit is another (`narrow` says where this is taken, and
what was measured).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.matmul.kept.mosaic import store
from pallas_kernels.matmul.mosaic_kernel import tiled
from pallas_kernels.matmul.mosaic_ring import fill
from pallas_kernels.matmul.tuning import SHARED_MEMORY

COLUMNS, DEPTH = 64, 64  # of a tile of w: its columns are the rows of a wgmma
CONSUMER, PRODUCER = range(2)  # warpgroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewColumns:
    """Slots of the ring at most, and tiles along K in each; speed only, never a result's bits."""

    slots: int
    deep: int

    def __post_init__(self):
        if self.slots < 2 or self.deep < 1:  # a slot is free once the next one is being summed
            raise ValueError(f"a ring has two slots, and a slot one tile, at least: {self}")


def product(
    x: Float[Array, "M K"], w: Float[Array, "K N"], *, pieces: int, tile: FewColumns
) -> Float[Array, "..."]:
    """As `few_rows.product`, without halves and residual; ValueError for what no tile divides."""
    (M, K), N = x.shape, w.shape[1]
    depth = DEPTH * tile.deep
    if N % COLUMNS or K % (depth * pieces):
        raise ValueError(f"{tile} divides neither {N} columns nor {pieces} pieces of {K}")
    if M > 8 and M % 8:
        x = jnp.pad(x, ((0, -M % 8), (0, 0)))
        return product(x, w, pieces=pieces, tile=tile)[..., :M, :]
    dtype = x.dtype if pieces == 1 else jnp.float32
    rows, steps = -(-M // 8) * 8, K // pieces // depth
    taken = rows * COLUMNS * jnp.dtype(dtype).itemsize
    slots = min(tile.slots, steps, (SHARED_MEMORY - taken) // (2 * depth * (COLUMNS + rows)))
    launch = plgpu.kernel(
        functools.partial(_kernel, steps=steps),
        out_type=jax.ShapeDtypeStruct((M, N) if pieces == 1 else (pieces, M, N), dtype),
        scratch_types={
            "w_ring": plgpu.SMEM((slots, depth, COLUMNS), w.dtype, transforms=tiled(128, 2)),
            "x_ring": plgpu.SMEM((slots, rows, depth), x.dtype, transforms=tiled(128, 2)),
            "out_smem": plgpu.SMEM((rows, COLUMNS), dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            "empty": plgpu.Barrier(num_barriers=slots),
        },
        grid=(N // COLUMNS, pieces),
        grid_names=("column", "piece"),
        num_threads=2,
        thread_name="wg",
        kernel_name="few_columns",
    )  # fmt: skip
    return launch(x, w)


def _kernel(x_gmem, w_gmem, out_gmem, *, w_ring, x_ring, out_smem, full, empty, steps: int):
    wg, piece = lax.axis_index("wg"), lax.axis_index("piece")
    columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
    (slots, depth, _), rows = w_ring.shape, pl.ds(0, x_ring.shape[1])

    @pl.when(wg == PRODUCER)
    def _():
        def load(step):
            slot, k = lax.rem(step, slots), pl.ds((piece * steps + step) * depth, depth)
            plgpu.copy_gmem_to_smem(w_gmem.at[k, columns], w_ring.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(x_gmem.at[rows, k], x_ring.at[slot], full.at[slot])

        fill(load, steps, empty, slots)

    @pl.when(wg == CONSUMER)
    def _():
        def summed(acc):
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, slots)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, *(ring.at[slot].transpose((1, 0)) for ring in (w_ring, x_ring)))
                plgpu.wgmma_wait(1)  # the step before this one has been read

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_arrive(empty.at[lax.rem(step - 1, slots)])

            value = acc[...]
            plgpu.barrier_arrive(empty.at[lax.rem(steps - 1, slots)])
            return value

        value = pl.run_scoped(summed, plgpu.WGMMAAccumulatorRef((COLUMNS, x_ring.shape[1])))
        store(out_smem, value.astype(out_smem.dtype))
        plgpu.commit_smem()
        target = out_gmem.at[piece] if len(out_gmem.shape) == 3 else out_gmem
        plgpu.copy_smem_to_gmem(out_smem, target.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)
