"""What devices tell each other by numbers in each other's memory: for kernels of Mosaic GPU."""

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


def say(count: Any, value: Any) -> None:
    """Sets a count after all that this warpgroup wrote."""
    _release("st.release.sys.global.u32 [$0], $1;", count, value)


def add(count: Any, value: Any) -> None:
    """Adds to a count after all that this warpgroup wrote."""
    _release("red.release.sys.global.add.u32 [$0], $1;", count, value)


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


def _release(ptx: str, count: Any, value: Any) -> None:
    @_inline
    def release(context, ref, value):
        del context
        mosaic.warpgroup_barrier()
        one = mosaic.single_thread_predicate(mosaic.ThreadSubset.WARPGROUP)
        mosaic.inline_ptx(
            ptx, mosaic.memref_ptr(ref), value.registers.item(), predicate=one,
            has_side_effects=True,
        )  # fmt: skip

    release(count, value)


def _inline(body: Any) -> Any:
    """`body` in MLIR, of a context, a reference and a number that all threads have."""
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))(body)
