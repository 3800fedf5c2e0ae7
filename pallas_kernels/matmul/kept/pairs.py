"""What a tile in pairs leaves in a warpgroup's registers: 32 columns of a gate, and of an up.

wgmma's sums of a tile are y^T [64, rows], and a thread has rows r and r + 8 of every 16: a gate and
the up of the same column. So each thread gates what it has.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.matmul.kept.fragments import COLUMNS, PAIRED
from pallas_kernels.matmul.mosaic_kernel import silu_times

OWN = COLUMNS // 2  # columns of a tile's result
WGMMA = plgpu.Layout.WGMMA
LANES = 4  # that share a row of wgmma's result
PAIR = 2  # numbers of a register


def store_gated(ref, value):
    """silu(gate) * up of a tile's sums [64, rows] to `ref` [rows, 32], rounded as products are."""
    gate, up = gate_and_up(value)
    store(ref, silu_times(gate, up, ref.dtype))


def gate_and_up(value):
    """The gates [64, rows / 2] and the ups: a thread's numbers of every two blocks of 8 rows of x
    lie where one block of sums has r and r + 8. The last of an odd number lies there twice."""
    blocks = value.shape[1] // 8
    shape = COLUMNS, -(-blocks // 2) * 8
    half = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=(half, half))
    def parts(ctx, value):
        del ctx
        own, layout = value.registers.reshape(blocks, 2), value.layout
        out = []
        for part in range(2):
            registers = np.empty(layout.registers_shape(shape), dtype=object)
            for i in range(registers.size):
                registers.flat[i] = own[min(i, blocks - 1), part]
            out.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
        return tuple(out)

    return parts(value)  # pyright: ignore[reportCallIssue]


def store(ref, value):
    """The numbers of `gate_and_up`'s places to `ref` [rows, 32]."""
    blocks = ref.shape[0] // 8

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx, ref, value):
        del ctx
        index = ir.IndexType.get()

        def number(n: int):
            return mosaic.c(n, index)

        thread = arith.index_cast(index, mosaic.thread_idx())
        thread = arith.remui(thread, number(mosaic.WARPGROUP_SIZE))
        warp, lane = (f(thread, number(mosaic.WARP_SIZE)) for f in (arith.divui, arith.remui))
        row, pair = (f(lane, number(LANES)) for f in (arith.divui, arith.remui))
        column = arith.addi(arith.muli(warp, number(PAIRED)), row)
        first = arith.muli(pair, number(PAIR))
        for block in range(blocks):
            numbers = value.registers.flat[block]
            for i in range(PAIR):
                at = [arith.addi(first, number(8 * block + i)), column]
                memref.store(vector.extract(numbers, [], [i]), ref, at)

    store(ref, value)  # pyright: ignore[reportCallIssue]
