"""A gated MLP of many rows between devices that share its columns, as one kernel.

A CTA first makes tiles of silu(x @ gate) * (x @ up) of this device's columns, which a warpgroup of
its own writes to all devices (`pallas_kernels/gather/blocks.py`) while the next one is summed. Then
it makes tiles of the product with down's columns of this device, whose rows it reads where they
landed, as they come. So what passes between devices passes while tiles are summed; with a gather
between two kernels nothing else did. All CTAs run at once, so each may wait for the others'.
The sums are those of `mosaic_gpu`, and no bit is another.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gather import Places
from pallas_kernels.gather.blocks import Blocks, Receiver, Sender, Turn
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.mosaic_kernel import (
    PRODUCER_REGISTERS,
    consume_tiles,
    out_dtype,
    out_swizzle,
    scratch,
    tiled,
)
from pallas_kernels.matmul.mosaic_ring import Ring, Tiles, load_rows, produce
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.pushed.plan import Plans, part, plans
from pallas_kernels.matmul.pushed.tiles import Held, InParts
from pallas_kernels.matmul.tuning import WARPGROUP_ROWS, Plan
from pallas_kernels.unsummed import Unsummed

CONSUMER, PRODUCER, STORER = range(3)  # warpgroups
CONSUMER_REGISTERS = 240


def gated(
    x: Float[Array, "M D"],
    gate_up: Any,
    down: Any,
    firsts: Firsts | None,
    *,
    columns: int,
    places: Places,
    axis: str,
    cores: int,
) -> Unsummed | None:
    """This device's columns of the product of all devices' gated rows with down, or its pieces;
    None if the weights or the sizes are not for this kernel. x is whole on every device, and
    `columns` are those of the whole down; a device has so many multiprocessors."""
    if not all(isinstance(w, jax.Array) and w.dtype == jnp.bfloat16 for w in (x, gate_up, down)):
        return None
    P = pieces("matmul", len(down), columns)
    both = plans(len(x), gate_up.shape, down.shape, P, cores)
    if both is None:
        return None
    halves = firsts or (0, gate_up.shape[1] // 2)
    out = _mlp(x, gate_up, down, places.blocks, axis, halves, both)
    return Unsummed(None, out) if out.ndim == 2 else Unsummed(out, None)


# One inner jit: the call sites of all layers then share one compiled kernel.
@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _mlp(x, gate_up, down, blocks: Blocks, axis: str, firsts: Firsts, both: Plans):
    """[M, N], or its pieces [S, M, N] in float32."""
    made, read = both
    shape = (read.M, read.N)
    shape = (read.tuning.split_k, *shape) if read.split else shape
    barriers = {
        f"{name}_{barrier}": scratch(plan)[barrier]
        for name, plan in zip(("made", "read"), both, strict=True)
        for barrier in ("full", "empty")
    }
    return plgpu.kernel(
        functools.partial(_kernel, both=both, firsts=firsts, axis=axis),
        out_type=jax.ShapeDtypeStruct(shape, out_dtype(read)),
        scratch_types={
            "held": _in_pieces(made),
            "filled": plgpu.Barrier(),
            "freed": plgpu.Barrier(),
            **barriers,
        },
        grid=(both.ctas,),
        grid_names=("cluster",),
        cluster=(1, 1),
        cluster_names=("m", "n"),
        num_threads=STORER + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
        kernel_name="mlp_pushed",
    )(x, gate_up, down, *blocks)


def _in_pieces(plan: Plan) -> Any:
    """A tile in shared memory as columns that lie in one block."""
    swizzle = out_swizzle(plan)
    width = swizzle // plan.out_bytes
    shape = (plan.half_n // width, WARPGROUP_ROWS, width)
    return plgpu.SMEM(shape, out_dtype(plan), transforms=tiled(swizzle, plan.out_bytes))


def _kernel(
    x, gate_up, down, landing, sent, turn, out, *, both: Plans, firsts, axis: str,
    held, filled, freed, made_full, made_empty, read_full, read_empty,
):  # fmt: skip
    blocks, (made, read) = Blocks(landing, sent, turn), both
    wg, cta = lax.axis_index("wg"), lax.axis_index("cluster")
    hands = Held(held, filled, freed)

    def keeper(number: int) -> Turn:
        return Turn.of(blocks, 2 * cta + number, 2 * both.ctas)

    def sender() -> Sender:
        return Sender.of(keeper(0), both.cut, cta == 0, axis)

    @pl.when(wg == CONSUMER)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

    @pl.when(wg != CONSUMER)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

    def make(x_smem, w_smem):
        ring, tiles = Ring(x_smem, w_smem, made_full, made_empty), _tiles(made)

        @pl.when(wg == PRODUCER)
        def _():
            produce(made, tiles, ring, firsts, functools.partial(load_rows, x), gate_up)

        @pl.when(wg == CONSUMER)
        def _():
            consume_tiles(made, tiles, ring, hands, out_smem=held)

        @pl.when(wg == STORER)
        def _():
            hands.send_most(tiles, sender())

    def use(x_smem, w_smem, out_smem):
        ring, tiles = Ring(x_smem, w_smem, read_full, read_empty), _tiles(read)

        @pl.when(wg == PRODUCER)
        def _():
            receiver = Receiver(keeper(1), both.cut)

            def load_x(step, rows, k, slot, full, across):
                del across  # no cluster
                receiver.wait(step, k.start)
                plgpu.copy_gmem_to_smem(receiver.place(rows, k.start), slot, full)

            produce(read, tiles, ring, (0,), load_x, down, ahead=read.tuning.stages)
            receiver.turn.end()

        @pl.when(wg == CONSUMER)
        def _():
            consume_tiles(read, tiles, ring, InParts(read, out), out_smem=out_smem)

        @pl.when(wg == STORER)
        def _():
            last = sender()
            hands.send_last(_tiles(made), last)
            last.end()

    swizzle = tiled(plgpu.find_swizzle(part(read) * read.out_bytes * 8), read.out_bytes)
    out_smem = plgpu.SMEM((1, WARPGROUP_ROWS, part(read)), out_dtype(read), transforms=swizzle)
    pl.run_scoped(make, **_ring(made), collective_axes="wg")
    pl.run_scoped(use, **_ring(read), out_smem=out_smem, collective_axes="wg")


def _ring(plan: Plan) -> dict[str, Any]:
    return {name: ref for name, ref in scratch(plan).items() if name in ("x_smem", "w_smem")}


def _tiles(plan: Plan) -> Tiles:
    """This CTA's; those past the plan's have none."""
    tiles = Tiles(plan)
    tiles.count = lax.select(tiles.first < plan.clusters, tiles.count, 0 * tiles.count)
    return tiles
