"""A gather by Mosaic GPU: each device writes its part to its peers, and waits for theirs.

A part is cut into tiles, of one row or of some short ones, and CTA i of every device moves the same
ones, by registers or by copies in bulk. It writes them to the peers' landing places, then says so
in the count that each peer keeps for it, and waits until its own counts say the same of the peers;
of small parts each number says so itself (`lines`). No device waits for a kernel to begin
elsewhere, so no barrier comes before.

Counts only grow, and nothing sets them back between calls or programs: a device may be a whole
gather ahead of a peer that has not begun. It cannot be two ahead, since it waits for that peer's
part. So two landing places, in turn, are enough: the one written now was read in the last gather
but one, which the peer ended before it wrote to us in the last one.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.gather import bulk, lines, registers
from pallas_kernels.gather.blocks import Blocks, empty_blocks
from pallas_kernels.gather.counts import say, together, wait
from pallas_kernels.gather.part import AT_ONCE, Part
from pallas_kernels.gather.registers import LEAST as LEAST

CTAS = 128  # at most one a multiprocessor, so all run at once; four each gain nothing
MOST = 2**22  # numbers of a device's part: what a landing place holds
STRETCH = 8  # numbers of a row that a copy in bulk moves at least, and a thread at most


class Places(NamedTuple):
    """One device's, or all devices' side by side; a program holds them as references."""

    landing: BFloat16[Array, "2 n _"]  # by turn and peer
    lines: Int32[Array, "2 n _"]  # the same of small parts, whose numbers come with the gather's
    counts: Int32[Array, "rows _"]  # the last gather that each of n peers sent, and own; by CTA
    blocks: Blocks  # of kernels that push what they make, whose gathers are counted by themselves


def empty_places(devices: int) -> Places:
    """One device's places before its first gather. All devices' must be there before any gather."""
    landing = jnp.zeros((2, devices, MOST), jnp.bfloat16)
    few = jnp.zeros((2, devices, lines.MOST), jnp.int32)
    counts = jnp.zeros((devices + 1, CTAS), jnp.int32)
    return Places(landing, few, counts, empty_blocks(devices))


def rows_of_tile(M: int, C: int) -> int | None:
    """Rows of a tile: one that is cut, or as many as are a tile together; None if M rows are no
    whole number of those, or they are too long, or go by a way that moves single rows."""
    rows = LEAST // math.gcd(C, LEAST)
    if rows == 1:
        return 1
    longest = registers.LONGEST if M * C <= lines.MOST else bulk.LONGEST * (M >= bulk.FEWEST)
    return rows if M % rows == 0 and C % STRETCH == 0 and rows * C <= longest else None


def gather(x: BFloat16[Array, "M C"], places: Places, axis: str) -> BFloat16[Array, "M _"]:
    """See the folder's contract. `rows_of_tile` must know the part."""
    if x.size <= lines.MOST:
        return _gather_lines(x, places.lines, places.counts, axis)
    return _gather(x, places.landing, places.counts, axis)


def adds(M: int, C: int) -> bool:
    """Whether `gather_sum` takes such parts: a part that goes by lines passes through registers."""
    return M * C <= lines.MOST and C % LEAST == 0


def gather_sum(
    pieces: Float32[Array, "P M C"], places: Places, axis: str
) -> BFloat16[Array, "M _"]:
    """The pieces' sum, rounded, in place of x."""
    return _gather_lines(pieces, places.lines, places.counts, axis)


# One inner jit: gathers of one shape share one kernel.
@functools.partial(jax.jit, static_argnums=3)
def _gather(x, landing, counts, axis: str):
    M, C = x.shape
    devices = counts.shape[0] - 1
    way = bulk if M >= bulk.FEWEST else registers
    x, rows = _side_by_side(x)
    length = way.length(x.shape[1])
    return plgpu.kernel(
        functools.partial(_kernel, axis=axis, length=length, rows=rows, moves=way.Moves),
        out_type=jax.ShapeDtypeStruct((M, devices * C), x.dtype),
        scratch_types=way.scratch(length, x.dtype, devices - 1),
        grid=(CTAS,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
        kernel_name="push",
    )(x, landing, counts)


def _kernel(x_ref, landing, counts, out_ref, *scratch, moves: Any, **sizes: Any):
    part, tiles, turn = task(x_ref, landing, counts, out_ref, **sizes)
    way, cta = moves(part, *scratch), lax.axis_index("cta")

    @pl.when(cta < tiles)  # the others have nothing to say, and count on
    def _():
        each = functools.partial(_each, tiles, cta)
        each(way.send)
        way.sent()
        said = counts.at[part.me, cta]
        say([plgpu.remote_ref(said, peer) for peer in part.peers], turn + 1)
        for peer in part.peers:
            wait(counts.at[peer, cta], turn + 1, most=1)  # that peer may be a gather ahead
        each(way.take)
        way.taken()

    counts[len(part.peers) + 1, cta] = turn + 1


@functools.partial(jax.jit, static_argnums=3)
def _gather_lines(x, landing, counts, axis: str):
    M, C = x.shape[-2:]
    devices = counts.shape[0] - 1
    x, rows = _side_by_side(x)
    length = lines.length(M, C, CTAS) if rows == 1 else x.shape[-1]
    return plgpu.kernel(
        functools.partial(_kernel_of_lines, axis=axis, length=length, rows=rows),
        out_type=jax.ShapeDtypeStruct((M, devices * C), jnp.bfloat16),
        grid=(CTAS,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
        kernel_name="push_lines",
    )(x, landing, counts)


def _kernel_of_lines(x_ref, landing, counts, out_ref, **sizes: Any):
    part, tiles, turn = task(x_ref, landing, counts, out_ref, **sizes)
    cta = lax.axis_index("cta")

    @pl.when(cta < tiles)
    def _():
        each = functools.partial(_each, tiles, cta)
        each(lambda some: lines.send(part, some, turn + 1))
        together()  # all threads have read the count that one sets
        each(lambda some: lines.take(part, some, turn + 1))

    counts[len(part.peers) + 1, cta] = turn + 1


def _side_by_side(x: Array) -> tuple[Array, int]:
    """The rows of each tile side by side, and how many they are."""
    *pieces, M, C = x.shape
    rows = rows_of_tile(M, C)
    assert rows is not None
    return x.reshape(*pieces, M // rows, rows * C), rows


def task(
    x_ref, landing, counts, out_ref, axis: str, length: int, rows: int = 1
) -> tuple[Part, int, Any]:
    """What a CTA moves: the part, of how many tiles, and the number of the gather before."""
    (M, C), devices = x_ref.shape[-2:], counts.shape[0] - 1
    me, turn = lax.axis_index(axis), counts[devices, lax.axis_index("cta")]
    peers = [lax.rem(me + i, devices) for i in range(1, devices)]
    part = Part(x_ref, landing, out_ref, turn & 1, me, peers, length, rows)
    return part, M * (C // length), turn


def _each(tiles: int, cta, move) -> None:
    """Calls `move` with a CTA's tiles, AT_ONCE of them at a time."""
    rounds, rest = divmod(tiles, CTAS * AT_ONCE)

    def several(i, _):
        move([cta + (i * AT_ONCE + k) * CTAS for k in range(AT_ONCE)])

    if rounds:
        lax.fori_loop(0, rounds, several, None)
    for first in range(tiles - rest, tiles, CTAS):
        if first + CTAS <= tiles:
            move([first + cta])
        else:
            pl.when(first + cta < tiles)(functools.partial(move, [first + cta]))
