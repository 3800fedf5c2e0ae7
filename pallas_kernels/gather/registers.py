"""A push through a CTA's registers: the sooner way for few rows."""

from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gather.part import Part

LEAST, LONGEST = 256, 1024  # columns of a tile: 4 and 16 bytes of each of 128 threads


def length(columns: int) -> int:
    """Columns of a tile."""
    return next(n for n in (LONGEST, LONGEST // 2, LEAST) if columns % n == 0)


def scratch(length: int, dtype: Any, peers: int) -> list[Any]:
    """None."""
    return []


class Moves(NamedTuple):
    """The moves of a CTA, several tiles at a time."""

    part: Part

    def send(self, tiles: list[Any]) -> None:
        landing, me, peers = self.part.landing, self.part.me, self.part.peers
        values = [self.part.x[self.part.own(tile)] for tile in tiles]
        for tile, value in zip(tiles, values, strict=True):
            for peer in peers:
                plgpu.remote_ref(landing, peer)[self.part.place(me, tile)] = value
            self.part.put(me, tile, value)

    def take(self, tiles: list[Any]) -> None:
        every = [(peer, tile) for peer in self.part.peers for tile in tiles]
        values = [self.part.landing[self.part.place(*one)] for one in every]
        for one, value in zip(every, values, strict=True):
            self.part.put(*one, value)

    def sent(self) -> None:
        """A store is made before what is said after it."""

    def taken(self) -> None:
        """Nor does the kernel end before its stores."""
