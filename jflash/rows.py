"""Which rows of the blocks a step verifies, and their order in its one pass.

A row is worth its time if the target is likely to reach it. The drafter's confidences rank the rows
of the whole batch, and a step verifies the best R of them: a fixed number, so that the shapes are
fixed. Recurrent layers go through a sequence's rows in turn, so for them a step verifies as many
rows of each block, its first. With one arithmetic (Models.one_arithmetic) no choice changes a
token's bits. This file knows no model and no way to draw a token.

Axes: B batch, W block width, D = W - 1 drafts, R rows of a step, w = R / B, N bins.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jflash.layers.cache import Cache, PagedCache
from jflash.layers.passes import Block, Projected
from jflash.records.kernels import Kernels

BINS = 32  # of survivals within 0 … 1, in a survey
SURVEYED = 3 * BINS + 2  # numbers of a survey


class Whole(NamedTuple):
    """Every row of every block, in its place: [B, W]."""

    widths: Int[Array, " B"]

    def pack(self, x: Array) -> Array:
        return x

    def unpack(self, x: Any) -> Any:
        return x

    def per_row(self, x: Any) -> Any:
        return x

    def over(self, block: Block) -> Block:
        return block

    def write[C: Cache](
        self, projected: Projected, cache: C, slots: Int[Array, "B W"], backend: str
    ) -> tuple[Array, C]:
        """The queries of the rows as they lie, and the cache with their keys and values."""
        return projected.write(cache, slots, backend)


class Leading(NamedTuple):
    """The first w rows of every block, in their place: [B, w]."""

    widths: Int[Array, " B"]  # at most w
    count: int  # w
    width: int  # W

    def pack(self, x: Array) -> Array:
        return x[:, : self.count]

    def unpack(self, x: Any) -> Any:
        """[B, W, …] from [B, w, …], for every array of a tree; past the first w zeros."""
        more = self.width - self.count
        return jax.tree.map(lambda a: jnp.pad(a, [(0, 0), (0, more)] + [(0, 0)] * (a.ndim - 2)), x)

    def per_row(self, x: Any) -> Any:
        return x

    def over(self, block: Block) -> Block:
        return block

    def write[C: Cache](
        self, projected: Projected, cache: C, slots: Int[Array, "B W"], backend: str
    ) -> tuple[Array, C]:
        """As of whole blocks, but [B, w, N, H]."""
        return projected.write(cache, self.pack(slots), backend)


class Packed(NamedTuple):
    """R rows as R sequences of one row, [R, 1]; a block's rows side by side, its anchor first.

    Rows that are left over repeat the last one, and `unpack` reads none of them.
    """

    widths: Int[Array, " B"]  # rows of each block, at least 1
    sequence: Int[Array, " R"]
    place: Int[Array, " R"]  # in the block
    spare: Bool[Array, " R"]  # left over
    row: Int[Array, "B W"]  # where a block's rows lie; past its width anywhere

    def pack(self, x: Array) -> Array:
        """[R, 1, …] from values of the blocks' rows [B, W, …]."""
        return x[self.sequence, self.place][:, None]

    def unpack(self, x: Any) -> Any:
        """[B, W, …] from [R, 1, …], for every array of a tree; past the widths any rows."""
        return jax.tree.map(lambda leaf: leaf[self.row, 0], x)

    def per_row(self, x: Any) -> Any:
        """[R, …] from values of the sequences [B, …]."""
        return jax.tree.map(lambda leaf: leaf[self.sequence], x)

    def over(self, block: Block) -> "PackedBlock":
        return PackedBlock(block, self)

    def write[C: Cache](
        self, projected: Projected, cache: C, slots: Int[Array, "B W"], backend: str
    ) -> tuple[Array, C]:
        """As of whole blocks, but [R, 1, N, H]: only the verified rows are normed and turned."""
        B, S = cache.k.shape[:2]
        own = slots[self.sequence, self.place]
        first, end = (0, B * S) if isinstance(cache, PagedCache) else (self.sequence * S, S)
        dropped = self.spare | (own >= end)  # each to a different place past the end
        places = jnp.where(dropped, B * S + jnp.arange(len(own)), first + own)
        return projected.write_flat(cache, places[:, None], backend)


Rows = Whole | Leading | Packed


class PackedBlock(NamedTuple):
    """The pass over packed rows: a layer works row by row, and attends block by block.

    The cache's slots and attention's widths are the block's, so every kernel serves it as it is.
    """

    block: Block
    rows: Packed

    @property
    def kernels(self) -> Kernels:
        return self.block.kernels

    def attend(self, spec, projected, cache, sinks=None):
        places = jnp.arange(self.rows.row.shape[1])
        slots = cache.slots(self.block.lengths[:, None] + places)
        q, cache = self.rows.write(projected, cache, slots, self.kernels.heads)
        out = self.block.seen(spec, self.rows.unpack(q), cache, sinks)
        return self.rows.pack(out), cache


def survivals(confidence: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """The probability that each draft is reached and right; invalid confidences count as 0."""
    sound = jnp.where(confidence >= 0, jnp.minimum(confidence, 1), 0)
    return jnp.cumprod(sound, axis=1)


def by_place(drafts: Int[Array, "B D"]) -> Float[Array, "B D"]:
    """In place of survivals, where each draft has a bin of its place: the first has the highest."""
    B, D = drafts.shape
    assert D <= BINS, f"{D} drafts for {BINS} bins"
    return jnp.broadcast_to((BINS - 0.5 - jnp.arange(D)) / BINS, (B, D))


def pick_rows(
    survival: Float[Array, "B D"],
    widths: Int[Array, " B"],
    done: Bool[Array, " B"],
    rows: int,
) -> Int[Array, " B"]:
    """The number of rows of each block that are verified, at most `rows` together.

    Each sequence that is not done gets its anchor's row, so `rows` is at least B. Drafts follow by
    their survival; of equal ones the smaller place comes first, then the smaller sequence.
    Survival never rises along a block, so a block's rows are its first ones.
    """
    B, W = survival.shape[0], survival.shape[1] + 1
    assert rows >= B, f"{rows} rows for {B} sequences"
    scores = jnp.concatenate([jnp.full((B, 1), 2.0), survival], axis=1)
    room = (jnp.arange(W) < widths[:, None]) & ~done[:, None]
    flat = jnp.where(room, scores, -1.0).T.reshape(-1)  # by (place, sequence)
    order = jnp.arange(flat.size)
    # Ranks by comparison: a sort's ties could differ from device to device.
    equal_before = (flat[None] == flat[:, None]) & (order[None] < order[:, None])
    rank = jnp.sum((flat[None] > flat[:, None]) | equal_before, axis=1)
    return jnp.sum((rank < rows).reshape(W, B).T & room, axis=1)


def packed(counts: Int[Array, " B"], width: int, rows: int) -> Packed:
    """The rows of `counts` from each block, in the order of the sequences."""
    ends = jnp.cumsum(counts)
    row = jnp.minimum(jnp.arange(rows), jnp.maximum(ends[-1] - 1, 0))
    sequence = jnp.minimum(jnp.sum(ends <= row[:, None], axis=1), len(counts) - 1)
    begins = ends - counts
    places = jnp.minimum(begins[:, None] + jnp.arange(width), rows - 1)
    place = jnp.maximum(row - begins[sequence], 0)
    spare = jnp.arange(rows) >= ends[-1]
    return Packed(jnp.maximum(counts, 1), sequence, place, spare, places)


class Survey(NamedTuple):
    """Counts of drafts by their survival, in N equal bins, or by their place: the host picks R by
    them.

    They are one array, because each array of a call takes the host's time.
    """

    counts: Any  # [3N + 2], of numpy once they are read, and so are the properties

    @property
    def offered(self) -> Any:
        """Drafts that had room, [N]."""
        return self.counts[:BINS]

    @property
    def verified(self) -> Any:
        """[N]."""
        return self.counts[BINS : 2 * BINS]

    @property
    def accepted(self) -> Any:
        """[N]."""
        return self.counts[2 * BINS : 3 * BINS]

    @property
    def live(self) -> Any:
        """Sequences that were not done, summed over steps."""
        return self.counts[-2]

    @property
    def steps(self) -> Any:
        return self.counts[-1]

    def seen(
        self,
        survival: Float[Array, "B D"],
        room: Int[Array, " B"],
        widths: Int[Array, " B"],
        accepted: Int[Array, " B"],
        done: Bool[Array, " B"],
    ) -> "Survey":
        """The counts after one more step, which verified `widths` of the blocks' `room` rows."""
        place = jnp.arange(survival.shape[1])
        bins = jnp.minimum((survival * BINS).astype(jnp.int32), BINS - 1)
        hot = (bins[..., None] == jnp.arange(BINS)) & ~done[:, None, None]

        drafts = jnp.stack([room - 1, widths - 1, accepted])
        within = place < drafts[..., None]
        more = jnp.sum(hot & within[..., None], axis=(1, 2)).reshape(-1)
        ends = jnp.stack([jnp.sum(~done), jnp.ones((), more.dtype)])
        return Survey(self.counts + jnp.concatenate([more, ends]).astype(jnp.int32))


def empty_survey() -> Survey:
    return Survey(jnp.zeros(SURVEYED, jnp.int32))
