"""Canonical products of many rows on Hopper in tiles of any multiple of 8 columns.

Tiles of whole swizzles, 64 columns, leave a last turn to few CTAs where their number is a little
above that of multiprocessors. Here w lies in shared memory as chunks of 64 columns, and wgmma takes
as many of their columns as a tile has; the rest is read in vain, and is in the L2 cache for its
neighbour. Nor need a chunk begin at a multiple of 64, so w may have any number of columns that
divides by 8, and the last tile begins early: what two tiles compute is the same.
A CTA has 128 rows and is a producer warpgroup and two consumers, each with 64 of them. It sums K in
ascending pieces, each by itself, and adds a piece's sum to that of those before, in registers.

So 129 to 256 rows take a product of several pieces in one turn, where a CTA for each piece took a
second turn that few of them filled, or left sums to be read: with Qwen3-8B's qkv so a step of 256
rows took 10.44 ms in place of 10.69, and one that verifies 256 of 512 rows 12.31 in place of 12.67
(H200, jax 0.11.2, 2026-11-26, in turns).
"""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm
from jaxtyping import Array, Float

from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.mosaic_kernel import (
    PRODUCER_REGISTERS,
    SWIZZLED_ROWS,
    silu_times,
    tiled,
)
from pallas_kernels.matmul.mosaic_ring import fill
from pallas_kernels.matmul.tuning import SMS, WARPGROUP_ROWS

CHUNK, STEP = 64, 64  # columns of a swizzle, and rows of K in a slot of the ring
CONSUMERS, CONSUMER_REGISTERS = 2, 232
ROWS = CONSUMERS * WARPGROUP_ROWS
SHARED_MEMORY = 232_448 - 512  # bytes, less barriers
MOST_SUMS = 272  # columns of sums in registers, a gate's and an up's: more would spill
LEAST_USED = 0.7  # of what is read from the L2 cache
# Slots: 3 do not hide a copy. Of 128 rows on an H200 (jax 0.11.2, 2026-11-23), gate and up of
# [5120, 34816] took 129.8 µs by 136 columns with 3 slots, and 114 by whole swizzles in turns; of
# [4096, 24576] 57.6 by 96 columns with 4 slots, and 59.3 in turns.
LEAST_RING = 4
WGMMA = plgpu.Layout.WGMMA
SWIZZLE = (plgpu.SwizzleTransform(2 * CHUNK),)  # pyright: ignore[reportAbstractUsage]
_wgmma = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")  # a function has its name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide:
    """Columns of a half's tile and slots of the ring; speed only, never a result's bits."""

    width: int
    ring: int

    def __post_init__(self):
        if self.width < 8 or self.width % 8 or self.ring < 2:
            raise ValueError(f"a tile's width divides by 8, and its ring has two slots: {self}")


def one_turn(
    K: int, columns: int, halves: int, *, row_tiles: int = 1, pieces: int = 1
) -> Wide | None:
    """The tile whose CTAs take `row_tiles` of 128 rows in one turn; None if it had sums of more
    than MOST_SUMS columns, or read too many in vain, or left its ring too few slots."""
    width = -(-columns // (SMS // row_tiles))
    width += -width % 8
    sums = halves * width * min(pieces, 2)  # a piece's, beside that of those before
    if K % (pieces * STEP) or columns % 8 or sums > MOST_SUMS or width > columns:
        return None
    if width < LEAST_USED * _chunks(width) * CHUNK:
        return None
    slot = 2 * STEP * (ROWS + halves * _chunks(width) * CHUNK)
    ring = min(8, K // STEP, (SHARED_MEMORY - 2 * ROWS * width) // slot)
    return Wide(width=width, ring=ring) if ring >= LEAST_RING else None


def in_turns(K: int) -> Wide:
    """A tile of one swizzle for any number of rows, and of columns that divides by 8."""
    slot = 2 * STEP * (ROWS + CHUNK)
    return Wide(width=CHUNK, ring=min(8, K // STEP, (SHARED_MEMORY - 2 * ROWS * CHUNK) // slot))


def _chunks(width: int) -> int:
    return -(-width // CHUNK)


@functools.partial(jax.jit, static_argnames=("tile", "halves", "pieces"))
def product(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"],
    *,
    tile: Wide,
    halves: Firsts | None = None,
    pieces: int = 1,
) -> Float[Array, "M _"]:
    """[M, N] rounded to x's dtype; of two `halves`, from these columns on, one gates the other."""
    (M, K), N = x.shape, w.shape[1]
    if M % SWIZZLED_ROWS:
        missing = ((0, -M % SWIZZLED_ROWS), (0, 0))
        return product(jnp.pad(x, missing), w, tile=tile, halves=halves, pieces=pieces)[:M]
    firsts = halves or (0,)
    columns, chunks = N // len(firsts), _chunks(tile.width)
    row_tiles = pl.cdiv(M, ROWS)
    fits = tile.ring <= K // STEP and tile.width <= columns
    assert fits and K % (pieces * STEP) == 0, (w.shape, tile, pieces)
    launch = plgpu.kernel(
        functools.partial(
            _kernel,
            tile=tile,
            firsts=firsts,
            columns=columns,
            steps=K // STEP,
            chunks=chunks,
            pieces=pieces,
            row_tiles=row_tiles,
        ),
        out_type=jax.ShapeDtypeStruct((M, columns), x.dtype),
        scratch_types={
            "x_ring": plgpu.SMEM((tile.ring, ROWS, STEP), x.dtype, transforms=tiled(2 * STEP, 2)),
            "w_ring": plgpu.SMEM(
                (tile.ring, len(firsts) * chunks, STEP, CHUNK), x.dtype, transforms=SWIZZLE
            ),
            "out_smem": plgpu.SMEM((CONSUMERS, WARPGROUP_ROWS, tile.width), x.dtype),
            "full": plgpu.Barrier(num_arrivals=1 + len(firsts) * chunks, num_barriers=tile.ring),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.ring),
        },
        grid=(pl.cdiv(columns, tile.width) * row_tiles,),
        grid_names=("tile",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="wide_gate_up" if halves else "wide_matmul",
    )
    return launch(x, w)


def _kernel(
    x_gmem, w_gmem, out_gmem, *, x_ring, w_ring, out_smem, full, empty,
    tile: Wide, firsts, columns: int, steps: int, chunks: int, pieces: int, row_tiles: int,
):  # fmt: skip
    wg, ring, number = lax.axis_index("wg"), tile.ring, lax.axis_index("tile")
    # Neighbours have the same columns: one reads them from memory, and the others from L2.
    column = jnp.minimum(lax.div(number, row_tiles) * tile.width, columns - tile.width)
    row = lax.rem(number, row_tiles) * ROWS

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def load(step):
            slot, k = lax.rem(step, ring), pl.ds(step * STEP, STEP)
            for i, (first, c) in enumerate((f, c) for f in firsts for c in range(chunks)):
                n = pl.ds(first + column + c * CHUNK, CHUNK)
                plgpu.copy_gmem_to_smem(w_gmem.at[k, n], w_ring.at[slot, i], full.at[slot])
            rows = x_gmem.at[pl.ds(row, ROWS), k]
            plgpu.copy_gmem_to_smem(rows, x_ring.at[slot], full.at[slot])

        fill(load, steps, empty, ring)

    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def add(step, sums):
            slot = lax.rem(step, ring)
            plgpu.barrier_wait(full.at[slot])
            own = x_ring.at[slot, pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)]
            sums = _added(sums, own, w_ring.at[slot], chunks)
            plgpu.barrier_arrive(empty.at[slot])
            return sums

        def piece(p):
            zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, tile.width), jnp.float32), WGMMA)
            first, last = (i * steps // pieces for i in (p, p + 1))
            return lax.fori_loop(first, last, add, (zeros,) * len(firsts))

        sums = piece(0)
        for p in range(1, pieces):
            sums = tuple(before + more for before, more in zip(sums, piece(p), strict=True))
        dtype = out_smem.dtype
        whole = sums[0].astype(dtype) if len(firsts) == 1 else silu_times(sums[0], sums[1], dtype)
        _store(out_smem.at[wg], whole)
        plgpu.commit_smem()
        rows = pl.ds(row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        target = out_gmem.at[rows, pl.ds(column, tile.width)]
        plgpu.copy_smem_to_gmem(out_smem.at[wg], target)
        plgpu.wait_smem_to_gmem(0)


def _added(sums, x, w, chunks: int) -> Any:
    """`sums` with x times each half's first columns of its chunks in w [halves * chunks, …]."""
    out = tuple(plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=WGMMA) for s in sums)
    types = ((WGMMA,) * len(sums), plgpu.RefType(tiled(2 * STEP, 2)), plgpu.RefType(SWIZZLE))

    @plgpu.inline_mgpu(arg_types=types, return_type=out)
    def add(ctx, sums, x, w):
        del ctx
        accs = [_wgmma.WGMMAAccumulator.from_registers(s) for s in sums]
        for i, acc in enumerate(accs):
            own = utils.memref_slice(w, slice(i * chunks, (i + 1) * chunks))
            accs[i] = _multiplied(acc, x, utils.memref_unsqueeze(own, 0))
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        return tuple(acc.value for acc in accs)

    return add(sums, x, w)  # pyright: ignore[reportCallIssue]


def _multiplied(acc, x, w):
    """`mgpu.wgmma`, but with as many columns of w's chunks as the accumulator has."""
    width, chunks = acc._value.shape[1], ir.MemRefType(w.type).shape[1]
    x_group, w_group = (WARPGROUP_ROWS, STEP), (STEP, chunks * CHUNK)
    describe = functools.partial(
        mma_utils.create_descriptor, swizzle=2 * CHUNK, large_tile=(STEP, CHUNK)
    )
    (x_start, x_steps), _, x_fastest = describe(x, group_size=x_group, logical_k_major=False)
    (w_start, w_steps), _, w_fastest = describe(w, group_size=w_group, logical_k_major=True)
    registers, bf16 = acc._value.registers.copy(), ir.BF16Type.get()
    registers[0:1] = _wgmma.wgmma_m64(
        registers[0:1], x_start, w_start,
        a_transpose=x_fastest != mma_utils.Dim.K, b_transpose=w_fastest != mma_utils.Dim.K,
        a_k_stride=x_steps[1][0], b_k_stride=w_steps[1][0],
        n=width, swizzle=2 * CHUNK, a_element_type=bf16, b_element_type=bf16,
    )  # fmt: skip
    value = mgpu.FragmentedArray(
        _registers=registers, _layout=acc._value.layout, _is_signed=acc._value.is_signed
    )
    layout = acc._original_layout
    return _wgmma.WGMMAAccumulator(_value=value, _original_layout=layout, _sync=False)


def _store(ref, value):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx, ref, value):
        del ctx
        value.store_untiled(ref, optimized=False)

    store(ref, value)  # pyright: ignore[reportCallIssue]
