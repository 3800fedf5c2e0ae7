"""How block attention on Hopper is cut: the tiles, and the slots that a row and a tile see.

This file knows no kernel: the same constants serve the launch, the walk and the sum of chunks.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

ROWS = 64  # of a wgmma
ROW_COLUMNS = 8  # of what a share leaves of each row, the fewest that such a layout has
SHARES = (1, 2, 4, 8)  # CTAs of a cluster, which has 8 at most on every part
# By head dim, so that two CTAs fit a multiprocessor; of 512 dims one.
STAGES = {64: 4, 128: 2, 256: 1, 512: 1}
# Four turns of two a multiprocessor. 16 rows of 256 dims took 88 µs where one text of eight has
# 30,000 tokens and 19.7 of 1,000 each; with half as many CTAs 128 and 17.7, and with one for each
# chunk of 262,144 positions 162 and 112.5 (one H200, jax 0.11.2, 2026-11-29).
CTAS = 1056
WALKED = 8  # pieces of a text that a walk takes at least, where others may take the rest


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut. Results depend on `chunk` and `block` in their last bits."""

    chunk: int  # slots a CTA walks
    block: int  # slots loaded and multiplied at a time
    stages: int  # blocks of K and of V on their way or in use
    walk: bool = False  # a CTA takes all chunks in turn, and merges each with those before
    ordered: bool = False  # chunks of several CTAs are merged one after the other, as by a walk
    strands: int = 1  # warpgroups of a walk, which take its chunks in turn; the first merges all
    shares: int = 1  # CTAs of a walk, which take its chunks in turn; each merges some columns
    tails: int = 0  # chunks of long texts that CTAs whose walk is done may take
    ctas: int = CTAS  # that chunks without a walk have, if as many see anything, and hardly more

    def __post_init__(self):
        if self.block % 64 or not 64 <= self.block <= 256:
            raise ValueError(f"block is {self.block}: it must be 64, 128, 192 or 256")
        if self.chunk < 1 or self.chunk % self.block:
            raise ValueError(f"chunk is {self.chunk}: it must be a multiple of {self.block=}")
        if not 1 <= self.stages <= self.chunk // self.block:
            raise ValueError(f"stages is {self.stages}: it must be 1 to {self.chunk // self.block}")
        if self.strands < 1 or (self.strands > 1 and not self.walk):
            raise ValueError(f"strands is {self.strands}: a walk has 1 or more, others 1")
        alone = self.strands == 1 and self.walk
        if self.tails and not alone:
            raise ValueError(f"tails is {self.tails}: only walks of one strand leave any")
        if self.shares not in SHARES or (self.shares > 1 and not alone):
            raise ValueError(f"shares is {self.shares}: a walk of one strand has 1, 2, 4 or 8")

    def shared_bytes(self, head_dim: int) -> int:
        """Upper bound of the first kernel's shared memory."""
        columns = min(head_dim, 128)
        each = self.stages * self.block * (head_dim + columns)
        handed = 4 * (self.strands - 1) * ROWS * columns  # in float32
        left = 8 * ROWS * (columns + ROW_COLUMNS) if self.shares > 1 else 0  # of two rounds
        once = 2 * ROWS * (head_dim + columns)  # queries and the result
        return once + 2 * self.strands * each + handed + left + 2048


def choose_tiles(B: int, S: int, K: int, H: int) -> Tiles:
    """Tiles for sizes known at compile time.

    T is not among them, so a block of any width is cut alike. A full cache makes about two CTAs a
    multiprocessor; one more chunk costs 64·H floats written and read again, so chunks are 128 at
    least (a whole step of an 8B pair at batch 1 and 2048 slots on an H200: 5.55 ms, with chunks of
    64 5.59; at batch 8 chunks of 512 took 6.99, of 256 7.07, of 128 7.20).
    """
    block = 64
    chunks = max(1, min(2 * 132 // (B * K), S // (2 * block)))
    chunk = -(-S // (chunks * block)) * block
    stages = min(STAGES[H], chunk // block)
    return Tiles(chunk=chunk, block=block, stages=stages)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The constants of a compiled kernel."""

    B: int
    T: int
    S: int
    K: int
    G: int
    H: int
    tiles: Tiles
    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    ring: bool
    paged: bool = False

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.T, ROWS // self.G)

    @property
    def queries(self) -> int:
        """Whole queries of a row tile: row r is query r // G, head r % G."""
        return pl.cdiv(self.T, self.row_tiles)

    @property
    def chunks(self) -> int:
        """Chunks of slots whose sums are written apart."""
        return 1 if self.tiles.walk else pl.cdiv(self.S, self.tiles.chunk)

    @property
    def tails(self) -> int:
        """Chunks of long texts that a walk may leave to others; 0 where no text can be long."""
        even = self.B == 1 or self.ring or self.window is not None
        return 0 if even or self.S // self.tiles.chunk <= WALKED else self.tiles.tails

    @property
    def written(self) -> int:
        """The sums that lie in memory between two kernels, each of a row tile of each KV head."""
        if not self.tiles.walk:
            return self.B * self.chunks
        return self.tails and self.B + self.tails

    @property
    def of_one_chunk(self) -> "Task":
        """The same for a CTA that takes one chunk, in the memory of a walk."""
        alone = replace(self.tiles, walk=False, shares=1, tails=0)
        return replace(self, tiles=alone)

    @property
    def turns(self) -> int:
        """CTAs along the slots, each of which takes every so many-th chunk of those that its rows
        see. One for each chunk of a large cache would be many that see nothing."""
        others = self.B * self.K * self.row_tiles * self.H // self.columns
        return min(self.chunks, pl.cdiv(self.tiles.ctas, others))

    @property
    def columns(self) -> int:
        """Columns of the result in a CTA's registers; a wide head takes two CTAs, or four."""
        return min(self.H, 128)

    @property
    def grid(self) -> dict[str, Any]:
        # The last axis runs fastest: CTAs that read the same slots, then neighbours in memory.
        grid = {
            "grid": (self.B, self.turns, self.K, self.row_tiles, self.H // self.columns),
            "grid_names": ("batch", "turn", "head", "tile", "part"),
        }
        shares = self.tiles.shares
        return grid | ({"cluster": (shares,), "cluster_names": ("share",)} if shares > 1 else {})

    def seen(self, length, width, query):
        """[first, last) slot that `query` of the block sees: always one run of slots."""
        # T more than any width: so `last` is a number a row even where all rows see alike.
        last = length + jnp.minimum(query + (1 if self.causal else self.T), width)
        first = jnp.zeros_like(query)
        if self.window is not None:
            first = jnp.maximum(length + query - self.window + 1, 0)
            if not self.causal:
                last = jnp.minimum(last, length + query + self.window)
        return first, last if self.ring else jnp.minimum(last, self.S)

    def seen_by_tile(self, length, width, tile):
        """[first, last) slot that some query of a row tile sees; of a ring, positions."""
        top = tile * self.queries
        return self.seen(length, width, top)[0], self.seen(length, width, top + self.queries - 1)[1]

    def read_by_tile(self, length, width, tile):
        """[first, last) slot to read: all, once a ring's last positions have come around."""
        first, last = self.seen_by_tile(length, width, tile)
        if self.ring:
            around = last > self.S
            first, last = jnp.where(around, 0, first), jnp.where(around, self.S, last)
        return first, last

    def after(self, place, first):
        """How many slots of a ring `place` comes after `first`; both may be positions."""
        steps = lax.rem(place, self.S) - lax.rem(first, self.S)
        return steps + jnp.where(steps < 0, self.S, 0)
