"""The root mean square of a row that a warpgroup holds, with the bits of `rms_norm`'s kernel.

Squares are summed in pairs: neighbours, then neighbouring pairs, and so on
(`pallas_kernels/in_pairs.py`). Numbers of bfloat16 have whole squares in float32, so that it is all
one whether a compiler joins a square and the sum that follows it.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.gather.part import THREADS, layout

WARPS = 4  # of a warpgroup


def room(rows: int, parts: int) -> Any:
    """Shared memory for the sums of so many rows, in so many parts each."""
    return plgpu.SMEM((rows, parts, WARPS), jnp.float32)


def inverse_rms(parts: list[Any], held: Any, eps: float) -> Any:
    """1 / √(mean of squares + eps). `parts` are a whole row in order, float32 in `layout`, and
    `held` is this row's alone of a `room`."""
    types = ([layout(part.shape[0]) for part in parts], plgpu.RefType())
    out = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT)
    count, length = len(parts), parts[0].shape[0]

    @plgpu.inline_mgpu(arg_types=types, return_type=out)
    def compute(context, parts, held):
        del context
        index = lambda i: mosaic.c(i, ir.IndexType.get())  # noqa: E731
        for i, part in enumerate(parts):  # all threads of a warp have one sum
            memref.store(_over_warp(_squares(part)), held, [index(i), _warp()])
        mosaic.warpgroup_barrier()
        at = lambda part, warp: memref.load(held, [index(part), index(warp)])  # noqa: E731
        total = _in_pairs([at(part, warp) for part in range(count) for warp in range(WARPS)])
        mean = _quotient(total, count * length)
        rsqrt = "rsqrt.approx.f32 $0, $1;"
        inverse = mosaic.inline_ptx(rsqrt, arith.addf(mean, _number(eps)), result_types=_f32())
        return mgpu.FragmentedArray.splat(inverse, ())

    return compute(parts, held)  # pyright: ignore[reportCallIssue]


def _f32() -> Any:
    return ir.F32Type.get()


def _number(value: float) -> Any:
    return mosaic.c(value, _f32())


def _quotient(total: Any, numbers: int) -> Any:
    """As Triton divides: by a power of two it is exact."""
    quotient = "div.full.f32 $0, $1, $2;"
    return mosaic.inline_ptx(quotient, total, _number(float(numbers)), result_types=_f32())


def _warp() -> Any:
    """This thread's warp of its warpgroup, as an index."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mosaic.thread_idx(), mosaic.c(THREADS, i32))
    warp = arith.divui(thread, mosaic.c(THREADS // WARPS, i32))
    return arith.index_cast(ir.IndexType.get(), warp)


def _squares(part: Any) -> Any:
    """The sum over this thread's numbers."""
    [numbers] = part.registers.flat
    each = [vector.extract(numbers, [], [i]) for i in range(part.shape[0] // THREADS)]
    return _in_pairs([arith.mulf(x, x) for x in each])


def _over_warp(x: Any) -> Any:
    for distance in (1, 2, 4, 8, 16):
        x = arith.addf(x, mosaic.shfl_bfly(x, distance))
    return x


def _in_pairs(each: list[Any]) -> Any:
    while len(each) > 1:
        if len(each) % 2:
            each = [*each, _number(0.0)]
        each = [arith.addf(*pair) for pair in zip(each[::2], each[1::2], strict=True)]
    return each[0]
