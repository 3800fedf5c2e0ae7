"""The strands of a walk, a warpgroup each: the chunks of each, and what they hand to the first.

Strand s takes every n-th chunk from the s-th on, with a ring of its own, and hands their sums to
strand 0, which merges all in ascending order. So a few CTAs keep more multiplications on their way,
and no bit is another. `mosaic_shares` has its own form of this, with CTAs in place of warpgroups.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_attention.mosaic_layouts import (
    LAYOUT,
    ROW_LAYOUT,
    SWIZZLED_ROWS,
    across,
)
from pallas_kernels.block_attention.mosaic_task import ROWS, Task
from pallas_kernels.block_attention.pieces import merge

# pyright: reportAbstractUsage=false


class Strand(NamedTuple):
    """A strand's blocks, numbered from its first chunk's first on: `first` to `last` are seen."""

    number: Any
    strands: int
    steps: int  # blocks of a chunk
    first_chunk: Any  # of all strands
    chunks: Any  # of all strands
    own: Any  # chunks of this one
    first: Any
    last: Any

    def block(self, i):
        """Which block of the sequence its block i is."""
        if self.strands == 1:
            return self.first_chunk * self.steps + i
        chunk = self.first_chunk + self.number + lax.div(i, self.steps) * self.strands
        return chunk * self.steps + lax.rem(i, self.steps)

    def has(self, j, other: int):
        """Whether strand `other` has a chunk j."""
        return j * self.strands + other < self.chunks


def strand_of(task: Task, number, begin, end) -> Strand:
    """The part of strand or share `number` in the blocks from `begin` to `end`."""
    strands, steps = task.tiles.strands * task.tiles.shares, task.tiles.chunk // task.tiles.block
    first_chunk = lax.div(begin, steps)
    chunks = lax.div(end + steps - 1, steps) - first_chunk
    own = lax.div(chunks - number + strands - 1, strands)
    cut = (first_chunk + chunks) * steps - end  # of the last chunk
    first = jnp.where(number == 0, begin - first_chunk * steps, 0)
    last = own * steps - jnp.where(lax.rem(chunks - 1, strands) == number, cut, 0)
    return Strand(number, strands, steps, first_chunk, chunks, own, first, last)


class Handed(NamedTuple):
    """What strands but the first hand over, each in a place of its own: a chunk's sums."""

    sums: Any  # [strands - 1, ROWS, columns]
    rows: Any  # [strands - 1, 2, ROWS]: the scales, and the sums of weights
    full: Any
    empty: Any


def scratch(task: Task) -> list[Any]:
    """The types of Handed's fields; none of one strand."""
    others = task.tiles.strands - 1
    if not others:
        return []
    wide = (plgpu.TilingTransform((SWIZZLED_ROWS, 32)), plgpu.SwizzleTransform(128))
    return [
        plgpu.SMEM((others, ROWS, task.columns), jnp.float32, transforms=wide),
        plgpu.SMEM((others, 2, ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=others),
        plgpu.Barrier(num_barriers=others),
    ]


def hand_over(to: Handed, place: int, piece):
    """Leaves a chunk's sums, and waits until they have been merged."""
    to.sums[place], to.rows[place, 0], to.rows[place, 1] = piece
    plgpu.barrier_arrive(to.full.at[place])
    plgpu.barrier_wait(to.empty.at[place])


def merge_handed(of: Handed, place: int, _, before):
    plgpu.barrier_wait(of.full.at[place])
    sums = plgpu.load(of.sums.at[place], layout=LAYOUT)
    scale, weight = (plgpu.load(of.rows.at[place, i], layout=ROW_LAYOUT) for i in range(2))
    plgpu.barrier_arrive(of.empty.at[place])
    return merge(before, (sums, scale, weight), across)
