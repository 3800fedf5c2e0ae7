"""What a push moves on one device: where each tile of its part lies, and where it goes."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

THREADS = 128  # of a warpgroup
AT_ONCE = 4  # tiles that a CTA loads before it stores them


class Part(NamedTuple):
    """References of one gather; a tile is `length` columns of a row, or some whole rows, which lie
    side by side in a row of `x`."""

    x: Any  # [M, C], or pieces of it [P, M, C]; of tiles of `rows` rows [M / rows, rows * C]
    landing: Any  # [2, devices, _]
    out: Any  # [M, devices * C]
    slot: Any  # of `landing`, in turn
    me: Any
    peers: list[Any]
    length: int
    rows: int = 1  # of a tile

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

    def result(self, device: Any, tile: Any) -> Iterator[tuple[Any, tuple[Any, Any]]]:
        """Of each row of a device's tile: where it lies in the tile, and where in `out`."""
        if self.rows == 1:
            yield pl.ds(0, self.length), self._at(device * self.x.shape[-1], tile)
            return
        C = self.length // self.rows
        for i in range(self.rows):
            yield pl.ds(i * C, C), (tile * self.rows + i, pl.ds(device * C, C))

    def put(self, device: Any, tile: Any, value: Any) -> None:
        """Writes a device's tile, in `layout`, to `out`."""
        if self.rows == 1:
            [(_, at)] = self.result(device, tile)
            self.out[at] = value
        else:
            _put_rows(self.out, value, tile, device, self.rows)

    @property
    def across(self) -> int:
        """Tiles of a row of `x`."""
        return self.x.shape[-1] // self.length

    def _at(self, first: Any, tile: Any) -> tuple[Any, Any]:
        column = first + lax.rem(tile, self.across) * self.length
        return tile // self.across, pl.ds(column, self.length)


def layout(length: int) -> Any:
    """A thread has its numbers of a tile side by side, if they are a power of two; else in several
    stretches."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=stretch(length))


def stretch(length: int) -> int:
    """Numbers that a thread has side by side."""
    each = length // THREADS
    return each & -each


def _put_rows(out: Any, value: Any, tile: Any, device: Any, rows: int) -> None:
    """Writes a tile of whole rows: no stretch of a thread passes the end of one."""
    length = value.shape[0]
    C = length // rows
    types = (plgpu.RefType(), layout(length), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=types)
    def put(context, out, value, tile, device):
        del context
        index = ir.IndexType.get()
        number, first = (arith.index_cast(index, x.registers.item()) for x in (tile, device))
        first = arith.muli(first, mosaic.c(C, index))
        number = arith.muli(number, mosaic.c(rows, index))
        places = value.layout.linear_thread_idxs()
        for at, numbers in zip(places, value.registers.flat, strict=True):
            row = arith.addi(number, arith.divui(at, mosaic.c(C, index)))
            column = arith.addi(first, arith.remui(at, mosaic.c(C, index)))
            vector.store(numbers, out, [row, column])

    put(out, value, tile, device)  # pyright: ignore[reportCallIssue]
