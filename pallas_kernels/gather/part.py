"""What a push moves on one device: where each tile of its part lies, and where it goes."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a warpgroup
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

    def value(self, tile: Any) -> Any:
        """A tile of `x` in `layout`; of a part in pieces their sum, as `matmul.summed` has it."""
        at, where = self.own(tile), layout(self.length)
        if len(self.x.shape) == len(at):
            return plgpu.load(self.x.at[at], layout=where)
        pieces = (plgpu.load(self.x.at[p, *at], layout=where) for p in range(self.x.shape[0]))
        return functools.reduce(jnp.add, pieces).astype(self.out.dtype)

    def place(self, device: Any, tile: Any) -> tuple[Any, Any, Any]:
        """Of a device's tile in `landing`."""
        return self.slot, device, pl.ds(tile * self.length, self.length)

    def result(self, device: Any, tile: Any) -> tuple[Any, Any]:
        """Of a device's tile in `out`."""
        return self._at(device * self.x.shape[-1], tile)

    @property
    def across(self) -> int:
        """Tiles of a row of `x`."""
        return self.x.shape[-1] // self.length

    def _at(self, first: Any, tile: Any) -> tuple[Any, Any]:
        column = first + lax.rem(tile, self.across) * self.length
        return tile // self.across, pl.ds(column, self.length)


def layout(length: int) -> Any:
    """A thread has its numbers of a tile side by side."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=length // THREADS)
