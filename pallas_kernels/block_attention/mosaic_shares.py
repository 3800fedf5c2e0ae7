"""The shares of a walk, a CTA of one cluster each: what they take from one another, and who merges.

Share s takes every n-th chunk from the s-th on, and leaves its sums in its shared memory, cut by
columns. Each share takes its columns of all chunks from there, merges them in ascending order, and
writes them. So a few sequences keep more multiprocessors busy, without a second kernel, and no bit
is another. It goes in rounds: a round is of one chunk of each share, of whose sums the others learn
while they walk the next.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.block_attention.mosaic_layouts import (
    LAYOUT,
    ROW_LAYOUT,
    SWIZZLED_ROWS,
    across,
)
from pallas_kernels.block_attention.mosaic_task import ROW_COLUMNS, ROWS, Task
from pallas_kernels.block_attention.pieces import merge

# pyright: reportAbstractUsage=false
AXIS = "share"
ITEM = 4  # bytes of a float32
CLUSTER_MEMORY = 7  # LLVM's number of the address space


class Mailbox(NamedTuple):
    """What a share has for all of them, of a round and of the one after it."""

    sums: Any  # [2, shares, ROWS, columns / shares], by who takes them
    rows: Any  # [2, ROWS, ROW_COLUMNS]: scales in the first half, sums of weights after them
    ready: Any  # all have left their sums of a round, and taken those of the round before it


def scratch(task: Task) -> list[Any]:
    """The types of Mailbox's fields; none of one share."""
    shares = task.tiles.shares
    if shares == 1:
        return []
    each = task.columns // shares
    return [
        plgpu.SMEM((2, shares, ROWS, each), jnp.float32, transforms=_tiled(each)),
        plgpu.SMEM((2, ROWS, ROW_COLUMNS), jnp.float32, transforms=_tiled(ROW_COLUMNS)),
        plgpu.ClusterBarrier(collective_axes=(AXIS,)),
    ]


def _tiled(columns: int):
    swizzle = min(128, ITEM * columns)
    tiling = plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // ITEM))
    return tiling, plgpu.SwizzleTransform(swizzle)


def rounds(task: Task, chunks, sums_of, nothing, mail: Mailbox):
    """All `chunks` merged, as `walk` says of this share's columns. `sums_of` a round's number gives
    the sums of this share's chunk there."""
    shares, share = task.tiles.shares, lax.axis_index(AXIS)
    count = jnp.maximum(1, lax.div(chunks + shares - 1, shares))
    each = task.columns // shares
    sums, top, total = nothing

    def leave(n, piece):
        _leave(mail, lax.rem(n, 2), shares, piece)
        plgpu.barrier_arrive(mail.ready)

    def one(n, before):
        following = sums_of(n + 1)  # while the others leave theirs of this round
        plgpu.barrier_wait(mail.ready)
        for sender in range(shares):
            there = (n * shares + sender < chunks).astype(jnp.int32)
            take = partial(_merged, mail, lax.rem(n, 2), sender, share)
            before = lax.fori_loop(0, there, lambda _, b, take=take: take(b), before)
        pl.when(n + 1 < count)(partial(leave, n + 1, following))
        return before

    leave(0, sums_of(0))
    merged = lax.fori_loop(0, count, one, (sums[:, :each], top, total))
    # A CTA's memory is there until all have taken from it: all its threads, and all its CTAs.
    plgpu.commit_smem()
    plgpu.barrier_arrive(mail.ready)
    plgpu.barrier_wait(mail.ready)
    return merged


def _leave(mail: Mailbox, turn, shares: int, piece) -> None:
    sums, scale, weight = piece
    each = sums.shape[1] // shares
    column = _row_column()
    for to in range(shares):
        mail.sums[turn, to] = sums[:, to * each : (to + 1) * each]
    wide = across(scale, column), across(weight, column)
    mail.rows[turn] = jnp.where(column < ROW_COLUMNS // 2, *wide)
    plgpu.commit_smem()


def _merged(mail: Mailbox, turn, sender: int, share, before):
    """With the sums of share number `sender`, of its columns that are this one's."""
    sums = _taken(mail.sums.at[turn, share], before[0].shape, sender)
    rows = _taken(mail.rows.at[turn], (ROWS, ROW_COLUMNS), sender)
    column = _row_column()
    scale, weight = (
        plgpu.layout_cast(jnp.where(own, rows, -jnp.inf).max(axis=1), ROW_LAYOUT)
        for own in (column < ROW_COLUMNS // 2, column >= ROW_COLUMNS // 2)
    )
    return merge(before, (sums, scale, weight), across)


def _taken(ref, shape, sender: int):
    """What lies at this place of a share's shared memory. `plgpu.cluster_ref` has no places that
    are known only when the kernel runs (jax 0.11.2)."""
    transforms = _tiled(shape[1])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=LAYOUT),
    )
    def load(ctx, ref):
        del ctx
        kind = ir.MemRefType(ref.type)
        i32 = ir.IntegerType.get_signless(32)
        there = utils.get_cluster_ptr(utils.memref_ptr(ref), utils.c(sender, i32), generic=False)
        space = ir.IntegerAttr.get(i32, CLUSTER_MEMORY)
        kind = ir.MemRefType.get(kind.shape, kind.element_type, None, space)
        return mgpu.FragmentedArray.load_tiled(
            utils.ptr_as_memref(there, kind),
            swizzle=transforms[1].swizzle, layout=LAYOUT.to_mgpu(), optimized=False,
        )  # fmt: skip

    return load(ref)  # pyright: ignore[reportCallIssue]


def _row_column():
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, ROW_COLUMNS), 1, layout=LAYOUT)
