"""A push by bulk copies through shared memory: more bytes are on their way than registers hold."""

from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gather.counts import order
from pallas_kernels.gather.part import AT_ONCE, Part

FEWEST = 128  # rows of a part; with fewer the way through shared memory takes longer
EACH, LONGEST = 256, 8192  # columns of a tile are so many times; AT_ONCE of the longest are 64 KB
TAKEN = 3  # peers whose tiles lie in shared memory at once


def length(columns: int) -> int:
    """Columns of a tile: of whole rows, or of equal pieces."""
    pieces = columns // EACH
    return EACH * next(n for n in range(LONGEST // EACH, 0, -1) if pieces % n == 0)


def scratch(length: int, dtype: Any, peers: int) -> list[Any]:
    """AT_ONCE tiles of each of some peers, and what tells that each is there."""
    tiles = AT_ONCE * min(peers, TAKEN)
    return [plgpu.SMEM((tiles, length), dtype), plgpu.Barrier(num_barriers=tiles)]


class Moves(NamedTuple):
    """The moves of a CTA, several tiles at a time."""

    part: Part
    held: Any
    here: Any

    def _load(self, source: Any, tiles: list[tuple]) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what lay there has left
        for i, at in enumerate(tiles):
            plgpu.copy_gmem_to_smem(
                source.at[at], self.held.at[i], self.here.at[i],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )  # fmt: skip

    def send(self, tiles: list[Any]) -> None:
        part = self.part
        self._load(part.x, [part.own(tile) for tile in tiles])
        for i, tile in enumerate(tiles):
            plgpu.barrier_wait(self.here.at[i])
            for peer in part.peers:
                there = plgpu.remote_ref(part.landing.at[part.place(part.me, tile)], peer)
                plgpu.copy_smem_to_gmem(self.held.at[i], there)
            self._put(i, part.me, tile)

    def _put(self, i: int, device: Any, tile: Any) -> None:
        """Copies a device's tile to the result."""
        for within, at in self.part.result(device, tile):
            plgpu.copy_smem_to_gmem(self.held.at[i, within], self.part.out.at[at])

    def sent(self) -> None:
        """Copies are not ordered with what is said after them: they must have been made."""
        plgpu.wait_smem_to_gmem(0)

    def take(self, tiles: list[Any]) -> None:
        part = self.part
        order()
        for first in range(0, len(part.peers), TAKEN):
            every = [(peer, tile) for peer in part.peers[first : first + TAKEN] for tile in tiles]
            self._load(part.landing, [part.place(*one) for one in every])
            for i, one in enumerate(every):
                plgpu.barrier_wait(self.here.at[i])
                self._put(i, *one)

    def taken(self) -> None:
        plgpu.wait_smem_to_gmem(0)
