"""Products of codes with codes on Hopper: rows and a weight in e4m3, each row with its scale.

wgmma takes e4m3 with K minor on both sides, as `Rounded` has them, so any multiple of 8 columns is
a tile. The producer, the ring and the persistent CTAs are those of bfloat16; sums are multiplied by
both scales in registers. A last tile begins early: what two tiles compute is the same.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.float8.rounded import DTYPE, Rounded
from pallas_kernels.matmul.mosaic_gpu import best_of_all, largest_of_all
from pallas_kernels.matmul.mosaic_kernel import (
    PRODUCER_REGISTERS,
    SWIZZLED_ROWS,
    WGMMA,
    accumulate,
    accumulators,
    consume_best,
    silu_times,
    tiled,
)
from pallas_kernels.matmul.mosaic_ring import Ring, Tiles, empty_barrier, load_rows, produce
from pallas_kernels.matmul.tuning import SMS, WARPGROUP_ROWS, Plan, Tuning

SHARED_MEMORY = 232_448 - 1_024  # bytes, less barriers and what is rounded up
REDUCTION = 2_048  # bytes with which a row's largest is found
STEP = 128  # of K in a slot of the ring: a swizzle's bytes
COLUMNS, MOST_COLUMNS = 16, 256  # a tile's are a multiple of the one, and at most the other
LEAST_RING, MOST_RING = 3, 8  # slots
SWIZZLE = tiled(STEP, 1)
Op = Literal["product", "gate_up", "best"]


def refusal(K: int, columns: int) -> str | None:
    """Why no tile serves a weight."""
    if K % STEP or K < LEAST_RING * STEP or columns % 8 or columns < COLUMNS:
        return f"takes K in {STEP}s and columns in 8s, not {K} and {columns}"
    return None


def plan_for(op: Op, M: int, K: int, N: int, out_bytes: int) -> Plan:
    """N counts w's columns. The widest tile that takes the fewest turns of the GPU."""
    halves = 2 if op == "gate_up" else 1
    columns, block_m = N // halves, WARPGROUP_ROWS * (1 if M <= WARPGROUP_ROWS else 2)
    row_tiles = pl.cdiv(M, block_m)
    fits = [w for w in range(COLUMNS, 1 + min(MOST_COLUMNS // halves, columns), COLUMNS)]

    def stages(width: int) -> int:
        scales = block_m // WARPGROUP_ROWS * halves * _aligned(width) * 4
        free = SHARED_MEMORY - (block_m * width * out_bytes or REDUCTION) - scales
        return min(MOST_RING, K // STEP, free // ((block_m + halves * width) * STEP))

    def cost(width: int) -> tuple[int, int]:
        turns = pl.cdiv(pl.cdiv(columns, width) * row_tiles, SMS)
        return turns * (width + COLUMNS), -width

    width = min((w for w in fits if stages(w) >= LEAST_RING), key=cost)
    tuning = Tuning(
        block_m=block_m, block_n=halves * width, block_k=STEP, stages=stages(width),
    )  # fmt: skip
    tiles = pl.cdiv(columns, width)
    return Plan(
        op=op, tuning=tuning, M=M, N=N, halves=halves, half_n=width, swizzle=STEP,
        row_groups=row_tiles, columns=tiles, clusters=min(tiles, max(1, SMS // row_tiles)),
        k_steps=K // STEP, k_minor=True,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("dtype", "halves"))
def product(
    x: Rounded, w: Rounded, *, dtype: DTypeLike, halves: Firsts | None = None
) -> Float[Array, "M _"]:
    """[M, N] rounded to `dtype`; of two `halves`, from these columns on, one gates the other."""
    (K, N), M = w.shape, len(x.codes)
    item = jnp.dtype(dtype).itemsize
    plan = plan_for("gate_up" if halves else "product", M, K, N, item)
    out = jax.ShapeDtypeStruct((_whole(M), N // plan.halves), dtype)
    lies = tiled(plgpu.find_swizzle(plan.half_n * item * 8), item)
    tile = plgpu.SMEM((plan.consumers, WARPGROUP_ROWS, plan.half_n), dtype, transforms=lies)
    return _launch(plan, x, w, halves or (0,), out, {"out_smem": tile})[:M]


@jax.jit
def largest(x: Rounded, head: Rounded) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    """The lowest id of each row's largest logit, and that logit."""
    largest, ids = _best(x, head, sums=False)
    return largest_of_all(largest, ids, head.shape[1])


@jax.jit
def confidence(
    x: Rounded, head: Rounded
) -> tuple[Int[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """`largest`, and the sums of exp(logit - largest)."""
    largest, ids, sums = _best(x, head, sums=True)
    return best_of_all(largest, ids, sums, head.shape[1])


def _best(x: Rounded, head: Rounded, *, sums: bool) -> list[Array]:
    """Of each CTA's columns, by rows: the largest logit, its id, and the sums."""
    (K, V), M = head.shape, len(x.codes)
    plan = plan_for("best", M, K, V, 0)
    rows = plan.row_groups * plan.tuning.block_m
    types = (jnp.float32, jnp.int32, jnp.float32)[: 2 + sums]
    out = tuple(jax.ShapeDtypeStruct((plan.clusters, rows), each) for each in types)
    return [part[:, :M] for part in _launch(plan, x, head, (0,), out, {})]


def _launch(plan: Plan, x: Rounded, w: Rounded, firsts, out, scratch: dict[str, Any]) -> Any:
    t, rows = plan.tuning, plan.row_groups * plan.tuning.block_m
    codes = jnp.pad(x.codes, ((0, _whole(plan.M) - plan.M), (0, 0)))
    scales = jnp.pad(x.scales, (0, rows - plan.M))
    shared = {
        "x_smem": plgpu.SMEM((t.stages, t.block_m, STEP), DTYPE, transforms=SWIZZLE),
        "w_smem": plgpu.SMEM((t.stages, plan.halves, plan.half_n, STEP), DTYPE, transforms=SWIZZLE),
        "full": plgpu.Barrier(num_arrivals=1 + plan.halves, num_barriers=t.stages),
        "empty": empty_barrier(plan),
        "scales_smem": plgpu.SMEM(
            (plan.consumers, plan.halves, _aligned(plan.half_n)), jnp.float32
        ),
        "scales_there": plgpu.Barrier(num_arrivals=plan.halves, num_barriers=plan.consumers),
    }
    launch = plgpu.kernel(
        functools.partial(_kernel, plan=plan, firsts=firsts),
        out_type=out,
        scratch_types=shared | scratch,
        grid=(plan.row_groups * plan.clusters,),
        grid_names=("cluster",),
        cluster=(1, 1),
        cluster_names=("m", "n"),
        num_threads=plan.consumers + 1,
        thread_name="wg",
        kernel_name=f"float8_{plan.op}",
    )
    return launch(codes, scales, *w)


def _kernel(
    x, x_scales, w, w_scales, *outputs,
    plan: Plan, firsts, x_smem, w_smem, full, empty, scales_smem, scales_there,
    out_smem: Any = None,
):  # fmt: skip
    wg = lax.axis_index("wg")
    tiles, ring = _Clamped(plan), Ring(x_smem, w_smem, full, empty)
    rows = pl.ds(tiles.row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @pl.when(wg == plan.consumers)
    def _():
        if plan.consumers > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(plan, tiles, ring, firsts, functools.partial(load_rows, x), w)

    @pl.when(wg < plan.consumers)
    def _():
        if plan.consumers > 1:
            plgpu.set_max_registers(232, action="increase")
        of_rows = plgpu.load(x_scales.at[rows], layout=WGMMA.reduce(1), optimized=False)

        def sums(i, column):
            """Tile number `i`'s products, scaled, one for each half."""
            own, there = pl.ds(0, plan.half_n), scales_there.at[wg]
            for half, first in enumerate(firsts):
                columns = w_scales.at[pl.ds(first + column, plan.half_n)]
                plgpu.copy_gmem_to_smem(columns, scales_smem.at[wg, half, own], there)
            values = pl.run_scoped(
                lambda *accs: accumulate(plan, ring, i, accs), *accumulators(plan)
            )
            plgpu.barrier_wait(there)
            return [
                _scaled(value, of_rows, scales_smem.at[wg, half, own])
                for half, value in enumerate(values)
            ]

        def logits(i):
            _, column = tiles.at(i)
            (found,) = sums(i, column)
            ids = plgpu.broadcasted_iota(jnp.int32, found.shape, 1, layout=WGMMA) + column
            return jnp.where(ids >= tiles.begin(i), found, -jnp.inf), ids

        if plan.op == "best":
            consume_best(tiles, logits, *outputs)
            return

        @pl.loop(0, tiles.count)
        def _tile(i):
            _, column = tiles.at(i)
            values = sums(i, column)
            dtype = out_smem.dtype
            one, other = values[0], values[-1]
            out = silu_times(one, other, dtype) if plan.halves == 2 else one.astype(dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left out_smem
            out_smem[wg] = out
            plgpu.commit_smem()
            columns = pl.ds(column, plan.half_n)
            plgpu.copy_smem_to_gmem(out_smem.at[wg], outputs[0].at[rows, columns])

        plgpu.wait_smem_to_gmem(0)


class _Clamped(Tiles):
    """Tiles of which the last begins early."""

    def begin(self, i):
        """The first column that no tile before has."""
        return (self.first + i * self.plan.clusters) * self.plan.half_n

    def at(self, i):
        last = self.plan.N // self.plan.halves - self.plan.half_n
        return 0, jnp.minimum(self.begin(i), last)


def _scaled(value, of_rows, scales):
    of_columns = plgpu.load(scales, layout=WGMMA.reduce(0), optimized=False)
    rows, columns = (
        lax.broadcast_in_dim(each, value.shape, [axis])
        for axis, each in enumerate((of_rows, of_columns))
    )
    return value * rows * columns


def _aligned(width: int) -> int:
    """Numbers of a row in shared memory that a copy may begin at: 128 bytes."""
    return -(-width // 32) * 32


def _whole(M: int) -> int:
    """Rows that fill whole swizzles."""
    return -(-M // SWIZZLED_ROWS) * SWIZZLED_ROWS
