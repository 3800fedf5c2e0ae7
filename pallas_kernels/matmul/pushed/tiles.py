"""What takes the tiles of the MLP that is one kernel (`pushed`): to all devices, or to the result.

It seems that a tensor memory accelerator that writes to a peer holds back its CTA's loads while the
link is full. All CTAs end their tiles at the same time, so tiles that are written at once cost as
long as the link needs for them, whatever they are hidden behind. So a tile goes a few rows at a
time, with a rest after each, which leaves the link room. 512 rows of Qwen3-8B's MLP, with the
gather after it, over two H200s: 158 µs without a rest, 149 with it, 146 if nothing is written to
the peer.
"""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gather.blocks import Sender
from pallas_kernels.matmul.mosaic_ring import Tiles
from pallas_kernels.matmul.tuning import Plan

# Rows that are written at once, and nanoseconds of rest: by (16, 500) 155.6 µs, (16, 2000) 149.1,
# (8, 500) 151.0, (32, 2000) and (64, 4000) 154.7.
AT_ONCE, REST = 16, 1000


class Held(NamedTuple):
    """Hands tiles from the warpgroup that sums them to the one that sends them."""

    smem: Any  # [pieces, rows, columns]: columns that lie in one block
    filled: Any
    freed: Any

    def take(self, _: Any, tile: Any, *where: Any) -> None:
        """Who sums calls this; a tile's place is the sender's matter."""
        del where
        pieces, height, width = self.smem.shape
        plgpu.barrier_wait(self.freed)
        for i in range(pieces):
            self.smem[i] = lax.slice(tile, (0, i * width), (height, (i + 1) * width))
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.filled)

    def send_most(self, tiles: Tiles, sender: Sender) -> None:
        """Sends all tiles but the last, each while the next one is summed."""
        plgpu.barrier_arrive(self.freed)

        @pl.loop(0, tiles.count - 1)
        def _(i):
            self._send(tiles, sender, i)
            plgpu.barrier_arrive(self.freed)

    def send_last(self, tiles: Tiles, sender: Sender) -> None:
        """And the last, while products of what landed are summed."""

        @pl.when(tiles.count > 0)
        def _():
            self._send(tiles, sender, tiles.count - 1)

    def _send(self, tiles: Tiles, sender: Sender, i: Any) -> None:
        pieces, height, width = self.smem.shape
        _, column = tiles.at(i)
        plgpu.barrier_wait(self.filled)
        for piece in range(pieces):
            for at in range(0, height, AT_ONCE):
                some = self.smem.at[piece, pl.ds(at, AT_ONCE)]
                sender.send(some, tiles.row + at, column + piece * width)
                _rest()
        sender.sent(i)


class InParts(NamedTuple):
    """Takes tiles to where the result lies by way of less shared memory than they have."""

    plan: Plan
    gmem: Any

    def take(self, smem: Any, tile: Any, split: Any, rows: Any, columns: Any) -> None:
        height, width = smem.shape
        target = self.gmem.at[split] if self.plan.split else self.gmem
        for at in range(0, tile.shape[1], width):
            if at:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem[...] = lax.slice(tile, (0, at), (height, at + width))
            plgpu.commit_smem()
            place = target.at[rows, pl.ds(columns.start + at, width)]
            plgpu.copy_smem_to_gmem(smem, place)


def _rest() -> None:
    @plgpu.inline_mgpu(arg_types=())
    def rest(context):
        del context
        mosaic.inline_ptx(f"nanosleep.u32 {REST};", has_side_effects=True)

    rest()  # pyright: ignore[reportCallIssue]
