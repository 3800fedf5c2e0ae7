"""Parts that a kernel pushes as it makes them, and reads of all devices where they landed.

A landing place has rows of BLOCK columns: the k-th block of columns of the whole, all its rows, and
then the next block. So a tile of any product's rows is one copy, whoever made it, and nothing is
laid in order afterwards. Each device writes its columns in waves, the first columns first, to all
devices and itself; after each tile it adds to the count that each of them keeps of that wave. Who
reads waits for the wave of an owner's columns when it comes to them.

All gathers here take turns with two landing places, and only the turn's number says which. What is
written in turn t lies where t - 2 lay. A peer has read that: the kernel that sends a part of t - 1
begins after the one that read t - 2, and we have waited for all of t - 1. For the same reason a
count is at most one gather ahead of its reader. Counts go round after 2^32.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels.gather import counts

BLOCK = 64  # columns
MOST = 2**24  # numbers of all devices' parts
WAVES = 8  # that are counted: later ones with the last
ALL = 2**13  # what a device adds to a count in one gather
KEEPERS = 512  # of the turn's number


class Blocks(NamedTuple):
    """One device's; a program holds them as references."""

    landing: BFloat16[Array, "2 _ 64"]  # by turn
    sent: Int32[Array, "n 8"]  # by each device to this one, and by wave: ALL a gather
    turn: Int32[Array, " 512"]  # the number of the last gather, many times


def empty_blocks(devices: int) -> Blocks:
    """One device's before the first gather."""
    landing = jnp.zeros((2, MOST // BLOCK, BLOCK), jnp.bfloat16)
    sent = jnp.zeros((devices, WAVES), jnp.int32)
    return Blocks(landing, sent, jnp.zeros(KEEPERS, jnp.int32))


class Cut(NamedTuple):
    """How each device's columns are made: `waves` has the number of tiles of each."""

    rows: int
    columns: int  # of a device
    width: int  # of a wave
    waves: tuple[int, ...]

    def wave(self, column: Any) -> Any:
        return jnp.minimum(lax.div(column, self.width), WAVES - 1)

    @property
    def counted(self) -> list[int]:
        """Tiles of each wave that is counted."""
        first, last = self.waves[: WAVES - 1], self.waves[WAVES - 1 :]
        return [*first, *[sum(last)] * bool(last)]


class Turn(NamedTuple):
    """This gather's number, for keeper `number` of `many` in a kernel: one that no other thread of
    it reads or sets, so that none sees it set too soon."""

    blocks: Blocks
    number: Any
    many: int
    value: Any

    @classmethod
    def of(cls, blocks: Blocks, number: Any, many: int):
        assert many <= KEEPERS
        return cls(blocks, number, many, blocks.turn[number] + 1)

    def end(self) -> None:
        """Sets it, for the next gather's keepers."""
        counts.together()

        @pl.loop(0, lax.div(KEEPERS - 1 - self.number, self.many) + 1)
        def _(i):
            self.blocks.turn[self.number + i * self.many] = self.value


class Sender(NamedTuple):
    """A warpgroup that sends tiles; `leads` is true of one that has a tile of every wave."""

    turn: Turn
    cut: Cut
    leads: Any
    me: Any
    peers: list[Any]

    @classmethod
    def of(cls, turn: Turn, cut: Cut, leads: Any, axis: str):
        me, devices = lax.axis_index(axis), turn.blocks.sent.shape[0]
        peers = [lax.rem(me + i, devices) for i in range(1, devices)]
        return cls(turn, cut, leads, me, peers)

    def send(self, tile: Any, row: Any, column: Any) -> None:
        """Begins to copy a tile of shared memory, of columns of one block, to its place here and
        on the peers; its first row and column are of this device's part."""
        height, width = tile.shape
        column = self.me * self.cut.columns + column
        place = pl.ds(lax.div(column, BLOCK) * self.cut.rows + row, height)
        columns = pl.ds(lax.rem(column, BLOCK), width)
        landing: Any = self.turn.blocks.landing
        there = landing.at[self.turn.value & 1, place, columns]
        for peer in self.peers:
            plgpu.copy_smem_to_gmem(tile, plgpu.remote_ref(there, peer), commit_group=False)
        plgpu.copy_smem_to_gmem(tile, there)

    def sent(self, i: Any) -> None:
        """Says that the i-th tile was sent, once all have arrived."""
        plgpu.wait_smem_to_gmem(0)
        wave, more = jnp.minimum(i, WAVES - 1), jnp.int32(0)
        for number, tiles in enumerate(self.cut.counted):
            more = jnp.where(i == number, ALL - tiles, more)
        counts.add(self._counts(wave), jnp.where(self.leads, more, 0) + 1)

    def end(self) -> None:
        """Says the same of waves that there are not, and sets the turn."""
        none = range(len(self.cut.counted), WAVES)
        if none:
            absent = [count for wave in none for count in self._counts(wave)]
            pl.when(self.leads)(lambda: counts.add_soon(absent, jnp.int32(ALL)))
        self.turn.end()

    def _counts(self, wave: Any) -> list[Any]:
        """Of one wave, here and on the peers."""
        sent: Any = self.turn.blocks.sent
        count = sent.at[self.me, wave]
        return [*(plgpu.remote_ref(count, peer) for peer in self.peers), count]


class Receiver(NamedTuple):
    """A warpgroup that reads rows, each device's columns after those before it."""

    turn: Turn
    cut: Cut

    def wait(self, step: Any, k: Any) -> None:
        """Until the BLOCK columns from k on have been sent; `step` is 0 where a tile begins."""
        local = lax.rem(k, self.cut.columns)
        first, last = self.cut.wave(local), self.cut.wave(local + BLOCK - 1)

        @pl.when((step == 0) | (local == 0) | (last != self.cut.wave(local - 1)))
        def _():
            owner = lax.div(k, self.cut.columns)
            for wave in (first, last):
                count = self.turn.blocks.sent.at[owner, wave]
                counts.wait(count, self.turn.value * ALL, most=ALL)
            counts.order()

    def place(self, rows: Any, k: Any) -> Any:
        """Where `rows` of these columns lie."""
        first = lax.div(k, BLOCK) * self.cut.rows + rows.start
        return self.turn.blocks.landing.at[self.turn.value & 1, pl.ds(first, rows.size)]
