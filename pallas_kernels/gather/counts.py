"""What devices tell each other by numbers in each other's memory: for kernels of Mosaic GPU."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf


def together() -> None:
    """Waits for the warpgroup's other threads."""

    @plgpu.inline_mgpu(arg_types=())
    def barrier(context):
        del context
        mosaic.warpgroup_barrier()

    barrier()  # pyright: ignore[reportCallIssue]


def say(counts: Sequence[Any], value: Any) -> None:
    """Sets counts after all that this warpgroup wrote."""
    _write("st.relaxed.sys.global.u32 [$0], $1;", counts, value, after_all=True)


def add(counts: Sequence[Any], value: Any) -> None:
    """Adds to counts after all that this warpgroup wrote."""
    _write("red.relaxed.sys.global.add.u32 [$0], $1;", counts, value, after_all=True)


def add_soon(counts: Sequence[Any], value: Any) -> None:
    """Adds to counts that stand for nothing that was written."""
    _write("red.relaxed.sys.global.add.u32 [$0], $1;", counts, value, after_all=False)


def wait(count: Any, value: Any, most: int) -> None:
    """Waits until a count of this device is `value`, or up to `most` more.

    Any other number is an earlier one, however long ago, since counts go round after 2^32.
    """

    @_inline
    def acquire(context, ref, value):
        del context
        i32 = ir.IntegerType.get_signless(32)
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            loop = scf.WhileOp([], [])
            with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
                seen = mosaic.inline_ptx(
                    "ld.acquire.sys.global.u32 $0, [$1];", mosaic.memref_ptr(ref),
                    result_types=i32, has_side_effects=True,
                )  # fmt: skip
                ahead = arith.subi(seen, value.registers.item())
                scf.condition(arith.cmpi(arith.CmpIPredicate.ugt, ahead, mosaic.c(most, i32)), [])
            with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
                scf.yield_([])
        mosaic.warpgroup_barrier()

    acquire(count, value)


def order() -> None:
    """What was read of a count comes before copies in bulk that begin now."""

    @plgpu.inline_mgpu(arg_types=())
    def fence(context):
        del context
        mosaic.inline_ptx("fence.proxy.async;", has_side_effects=True)

    fence()  # pyright: ignore[reportCallIssue]


def _write(ptx: str, counts: Sequence[Any], value: Any, *, after_all: bool) -> None:
    """One thread writes all of them, behind one fence. With one for each, Qwen3-8B's step at
    batch 32 over four H200s took 9.82 ms in place of 9.43 (benchmarks/h200-x4-norms.json)."""
    types = (tuple(plgpu.RefType() for _ in counts), plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=types)
    def write(context, refs, value):
        del context
        if after_all:
            mosaic.warpgroup_barrier()
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            if after_all:
                mosaic.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
            for ref in refs:
                address, number = mosaic.memref_ptr(ref), value.registers.item()
                mosaic.inline_ptx(ptx, address, number, has_side_effects=True)

    write(tuple(counts), value)  # pyright: ignore[reportCallIssue]


def _inline(body: Any) -> Any:
    """`body` in MLIR, of a context, a reference and a number that all threads have."""
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))(body)
