"""The walk of a CTA: the online softmax over the blocks of slots that its rows see.

Keys and values pass through a ring of shared memory; see `mosaic_gpu` for the whole.
A walk may have several strands (`mosaic_strands`), or several shares (`mosaic_shares`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_attention import mosaic_shares, mosaic_strands
from pallas_kernels.block_attention.combine import LOG2E
from pallas_kernels.block_attention.mosaic_layouts import LAYOUT, ROW_LAYOUT, SWIZZLED, across
from pallas_kernels.block_attention.mosaic_shares import AXIS, Mailbox, rounds
from pallas_kernels.block_attention.mosaic_strands import (
    Handed,
    hand_over,
    merge_handed,
    strand_of,
)
from pallas_kernels.block_attention.mosaic_task import ROWS, Task
from pallas_kernels.block_attention.pieces import LOWEST, merge


class Memory(NamedTuple):
    """A CTA's shared memory and barriers. Strands have their parts side by side."""

    q: Any  # [ROWS, H]
    k: Any  # [strands · stages, block, H]
    v: Any  # [strands · stages, block, columns]
    q_bar: Any
    k_bar: Any
    v_bar: Any
    handed: Any = None  # Handed, of several strands
    mail: Any = None  # Mailbox, of several shares


def scratch(task: Task) -> list[Any]:
    """The types of Memory's fields, those of `Handed` and `Mailbox` in their place."""
    tiles = task.tiles

    def operand(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    memory = [
        operand(ROWS, task.H),
        operand(tiles.strands * tiles.stages, tiles.block, task.H),
        operand(tiles.strands * tiles.stages, tiles.block, task.columns),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=tiles.strands * tiles.stages),
        plgpu.Barrier(num_barriers=tiles.strands * tiles.stages),
    ]
    return [*memory, *mosaic_strands.scratch(task), *mosaic_shares.scratch(task)]


def memory_of(task: Task, refs) -> Memory:
    """The record of `scratch`'s references."""
    q, k, v, q_bar, k_bar, v_bar, *others = refs
    handed = Handed(*others) if task.tiles.strands > 1 else None
    mail = Mailbox(*others) if task.tiles.shares > 1 else None
    return Memory(q, k, v, q_bar, k_bar, v_bar, handed, mail)


def walk(
    task: Task,
    q_ref,  # [B, K, tiles, up to ROWS, H]
    k_ref,  # [B, S, K, H], or pages [_, block, K, H]
    v_ref,
    table_ref,  # [B, S / block]: the page of each block; None without pages
    length,
    width,
    at,  # batch, chunk, head, tile, part
    memory: Memory,
    strand: int = 0,
    most=None,
):
    """The online softmax over a chunk's visible blocks, or over all of them, or those of the first
    `most` chunks: sums of values [ROWS, columns], the scale of each row and the sum of its weights
    [ROWS], see `pieces`.

    A strand but the first returns sums that mean nothing, and a share those of its columns.
    """
    b, chunk, head, tile, part = at
    block, stages, steps = task.tiles.block, task.tiles.stages, task.tiles.chunk // task.tiles.block
    first_read, last_read = task.read_by_tile(length, width, tile)
    begin, end = lax.div(first_read, block), lax.div(last_read + block - 1, block)
    if not task.tiles.walk:
        begin, end = jnp.maximum(chunk * steps, begin), jnp.minimum((chunk + 1) * steps, end)
    elif most is not None:
        end = jnp.minimum(end, most * steps)
    number = lax.axis_index(AXIS) if task.tiles.shares > 1 else strand
    mine = strand_of(task, number, begin, end)
    n, m = mine.first, mine.last

    def slot_of(i):
        return strand * stages + lax.rem(i - n, stages)

    def fetch(i):
        slot, place = slot_of(i), mine.block(i)
        if task.paged:
            here = (table_ref[b, place], pl.ds(0, block), head)
        else:
            here = (b, pl.ds(place * block, block), head)
        values = v_ref.at[(*here, pl.ds(part * task.columns, task.columns))]
        plgpu.copy_gmem_to_smem(k_ref.at[here], memory.k.at[slot], memory.k_bar.at[slot])
        plgpu.copy_gmem_to_smem(values, memory.v.at[slot], memory.v_bar.at[slot])

    if strand == 0:  # rows past the last are zeros by TMA
        plgpu.copy_gmem_to_smem(q_ref.at[b, head, tile, pl.ds(0, ROWS)], memory.q, memory.q_bar)
    for i in range(stages):
        pl.when(n + i < m)(partial(fetch, n + i))
    sight = _sight(task, length, width, tile)
    plgpu.barrier_wait(memory.q_bar)

    def step(i, carry):
        carry = _add_block(task, sight, memory, mine.block(i), slot_of(i), carry)
        if task.tiles.walk or steps > stages:
            pl.when(i + stages < m)(partial(fetch, i + stages))
        return carry

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, task.columns), jnp.float32), LAYOUT)
    zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW_LAYOUT)
    lowest = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
    nothing = (zeros, lowest, zero)
    if not task.tiles.walk:
        return lax.fori_loop(n, m, step, nothing)

    def sums_of(j):
        first, last = jnp.maximum(n, j * steps), jnp.minimum(m, (j + 1) * steps)
        return lax.fori_loop(first, last, step, nothing)

    if task.tiles.shares > 1:
        return rounds(task, mine.chunks, sums_of, nothing, memory.mail)
    if strand:
        pl.loop(0, mine.own)(lambda j: hand_over(memory.handed, strand - 1, sums_of(j)))
        return nothing

    def piece(j, before):
        before = merge(before, sums_of(j), across)
        for other in range(1, task.tiles.strands):
            there = mine.has(j, other).astype(jnp.int32)
            take = partial(merge_handed, memory.handed, other - 1)
            before = lax.fori_loop(0, there, take, before)
        return before

    return lax.fori_loop(0, mine.own, piece, nothing)


class _Sight(NamedTuple):
    """[first, last) slot that some row of the tile sees, and that each row sees [ROWS]."""

    first: Any
    last: Any
    row_first: Any
    row_last: Any
    row_begin: Any  # of a ring: the slot of row_first


def _sight(task: Task, length, width, tile) -> _Sight:
    first, last = task.seen_by_tile(length, width, tile)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
    row_first, row_last = task.seen(length, width, tile * task.queries + lax.div(row, task.G))
    return _Sight(first, last, row_first, row_last, lax.rem(row_first, task.S))


def _add_block(task: Task, sight: _Sight, memory: Memory, i, slot, carry):
    """The sums with block i, which lies or arrives at `slot` of the strands' rings."""
    acc, top, total = carry
    plgpu.barrier_wait(memory.k_bar.at[slot])

    def qk(acc_ref):
        plgpu.wgmma(acc_ref, memory.q, memory.k.at[slot].transpose((1, 0)))
        return acc_ref[...]

    scores = plgpu.WGMMAAccumulatorRef((ROWS, task.tiles.block), jnp.float32)
    logits = _logits(task, pl.run_scoped(qk, scores))
    logits = jnp.where(_visible(task, sight, i), logits, -jnp.inf)
    new_top = jnp.maximum(top, jnp.round(logits.max(axis=1)))
    weights = jnp.exp2(logits - across(new_top, logits))
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + weights.sum(axis=1)

    plgpu.barrier_wait(memory.v_bar.at[slot])
    _clear_unseen(task, sight, memory.v.at[slot], i)

    def pv(acc_ref):
        # From registers: ptxas before 13.3 is reported to miscompile this where other
        # multiplications are on their way, and here none is.
        plgpu.wgmma(acc_ref, weights.astype(jnp.bfloat16), memory.v.at[slot])
        return acc_ref[...]

    added = pl.run_scoped(pv, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))
    return acc * across(shrink, acc) + added, new_top, total


def _visible(task: Task, sight: _Sight, i):
    """Which slots of block i each row sees: [ROWS, block]."""
    block = task.tiles.block
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=LAYOUT)
    if task.ring:
        after = column - across(sight.row_begin - i * block, column)
        after += jnp.where(after < 0, task.S, 0)
        return after < across(sight.row_last - sight.row_first, column)
    visible = column < across(sight.row_last - i * block, column)
    if task.window is not None:
        visible &= column >= across(sight.row_first - i * block, column)
    return visible


def _clear_unseen(task: Task, sight: _Sight, v_s, i):
    """Zeroes values that no row sees: 0 * NaN is NaN. At most two blocks have any."""
    block, (first, last, *_) = task.tiles.block, sight
    if task.ring:
        dead = task.S - (last - first)
        outside = task.after(i * block, last) < dead
        outside |= (task.after(last, i * block) < block) & (dead > 0)
        pl.when(outside)(lambda: _clear_ring(task, v_s, i * block, first, last))
        return
    outside = (i + 1) * block > last
    if task.window is not None:
        outside |= i * block < first
    pl.when(outside)(lambda: _clear(v_s, first - i * block, last - i * block))


def _logits(task: Task, products):
    """Scores in units of log 2, for exp2."""
    if task.softcap is None:
        return products * (task.scale * LOG2E)
    # The device's tanh has only 11 good bits, which is too few once multiplied by the cap.
    twice = jnp.exp2(products * (2 * task.scale * LOG2E / task.softcap))
    return task.softcap * LOG2E - (2 * task.softcap * LOG2E) / (twice + 1)


def _clear(v_s, first, last):
    """Zeroes the rows of v_s [block, columns] outside [first, last)."""
    row = plgpu.broadcasted_iota(jnp.int32, v_s.shape, 0, layout=LAYOUT)
    values = plgpu.load(v_s, layout=LAYOUT)
    v_s[...] = jnp.where((row >= first) & (row < last), values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _clear_ring(task: Task, v_s, begin, first, last):
    """Zeroes rows of v_s, a ring's slots from begin, whose position is not in [first, last)."""
    row = plgpu.broadcasted_iota(jnp.int32, v_s.shape, 0, layout=LAYOUT)
    values = plgpu.load(v_s, layout=LAYOUT)
    seen = task.after(row + begin, first) < last - first
    v_s[...] = jnp.where(seen, values, jnp.zeros_like(values))
    plgpu.commit_smem()
