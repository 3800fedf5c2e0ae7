"""Tails of texts that are much longer than those beside them: who computes them.

A walk of a long text would keep a call of many texts waiting. So it takes the first pieces alone,
and once its own walk is done each CTA of the call takes pieces of what is left, the tails, which
are written apart. A second kernel merges them with what the walk left (`combine_tails`), in
ascending order, so no bit is another. Where no text is so long it has nothing to do.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.block_attention.mosaic_left import Left, leave
from pallas_kernels.block_attention.mosaic_shares import AXIS
from pallas_kernels.block_attention.mosaic_task import WALKED, Task


def plan(task: Task, lengths: Int[Array, " B"], widths: Int[Array, " B"]) -> Int[Array, " _"]:
    """The pieces that a walk takes at most; of each text the pieces of tails before its own; the
    pieces of all tails; the number of texts that have one; and these, in B places: [2 B + 3].

    A walk takes WALKED pieces, or a quarter more than the median of all texts, so that texts of
    about one length have no tails; and more if the tails would not fit their room. All CTAs share
    the tails, so a step ends the sooner the fewer pieces the longest walk has.
    """
    size, B = task.tiles.chunk, task.B
    pieces = pl.cdiv(task.read_by_tile(lengths, widths, task.row_tiles - 1)[1], size)
    shorter = jnp.sum(pieces <= pieces[:, None], axis=1)  # a sort is a kernel of its own
    median = jnp.min(jnp.where(2 * shorter >= B, pieces, task.S))
    least = jnp.maximum(WALKED, pl.cdiv(5 * median, 4))
    doublings = max(1, (task.S // size // WALKED).bit_length())
    limits = least << jnp.arange(doublings)
    room = jnp.sum(jnp.maximum(pieces - limits[:, None], 0), axis=1) <= task.tiles.tails
    limit = least << jnp.sum(jnp.logical_not(room))
    tails = jnp.maximum(pieces - limit, 0)
    before = jnp.arange(B) < jnp.arange(B + 1)[:, None]
    place = jnp.sum(before * (tails > 0), axis=1)
    texts = jnp.arange(B) * (tails > 0) * (place[:B] == jnp.arange(B)[:, None])
    each = limit[None], jnp.sum(before * tails, axis=1), place[B:], jnp.sum(texts, axis=1)
    return jnp.concatenate(each).astype(jnp.int32)


def has_tail(plan_ref, b):
    return plan_ref[b + 2] > plan_ref[b + 1]


def texts_with_tails(plan_ref, B: int, read):
    """How many texts have a tail, and a function that gives the nth; `read` reads a number."""
    return read(plan_ref.at[jnp.int32(B + 2)]), lambda n: read(plan_ref.at[B + 3 + n])


def take(task: Task, plan_ref, left: Left, at, sums_of) -> None:
    """Computes this CTA's pieces of tails; `sums_of` gives those of a text and a piece."""
    b, _, *here, part = at
    shares = task.tiles.shares
    number = b * shares + (lax.axis_index(AXIS) if shares > 1 else 0)

    @pl.loop(number, plan_ref[task.B + 1], step=task.B * shares)
    def take_one(item):
        text = jnp.int32(0)
        for other in range(1, task.B):
            text += (plan_ref[other + 1] <= item).astype(jnp.int32)
        piece = plan_ref[0] + item - plan_ref[text + 1]
        columns = pl.ds(part * task.columns, task.columns)
        leave(left, (task.B + item, *here), columns, sums_of(text, piece))
