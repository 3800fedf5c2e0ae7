"""What a push moves on one device: where each tile of its part lies, and where it goes."""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

AT_ONCE = 4  # tiles that a CTA loads before it stores them


class Part(NamedTuple):
    """References of one gather; a tile has `length` columns of a row."""

    x: Any  # [M, C], or pieces of it [P, M, C]
    landing: Any  # [2, devices, _]
    out: Any  # [M, devices * C]
    slot: Any  # of `landing`, in turn
    me: Any
    peers: list[Any]
    length: int

    def own(self, tile: Any) -> tuple[Any, Any]:
        """Of a tile in `x`."""
        return self._at(0, tile)

    def place(self, device: Any, tile: Any) -> tuple[Any, Any, Any]:
        """Of a device's tile in `landing`."""
        return self.slot, device, pl.ds(tile * self.length, self.length)

    def result(self, device: Any, tile: Any) -> tuple[Any, Any]:
        """Of a device's tile in `out`."""
        return self._at(device * self.x.shape[-1], tile)

    def _at(self, first: Any, tile: Any) -> tuple[Any, Any]:
        across = self.x.shape[-1] // self.length
        return tile // across, pl.ds(first + lax.rem(tile, across) * self.length, self.length)
