"""The gated delta rule's row in a warp of a Mosaic program, with the sums of `triton`.

A thread has two columns of the state, and of their rows one of RESIDUES: numbers r, r + RESIDUES …
It adds their products one after another, and the residues are added in halves.
"""

from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.gated_delta.mosaic_values import Int, integer

RESIDUES = 8  # `triton.TILE`
COLUMNS = 32  # of a CTA: two of a thread, eight of a warp
WARP, THREADS = 32, 128


class Lane(NamedTuple):
    """A thread, its residue, and the first of its columns: in its CTA's, and in a head's."""

    thread: Int
    residue: Int
    in_block: Int
    column: Int

    @classmethod
    def of(cls, block: Int) -> "Lane":
        thread = Int(mosaic.thread_idx()) % integer(THREADS)
        lane, quarter = thread % integer(WARP), integer(COLUMNS // (THREADS // WARP))
        in_block = (thread // integer(WARP)) * quarter + (lane % integer(4)) * integer(2)
        return cls(thread, lane // integer(4), in_block, block * integer(COLUMNS) + in_block)


def step(tiles: list[Any], keys: list[Any], value: list[Any], decay: Any, weight: Any) -> list[Any]:
    """The state after one token, of which `decay` is e^g."""
    tiles = [arith.mulf(decay, x) for x in tiles]
    sums = seen(keys, tiles)
    changes = [arith.mulf(weight, arith.subf(x, s)) for x, s in zip(value, sums, strict=True)]
    return [_fma(keys[i // 2], changes[i % 2], x) for i, x in enumerate(tiles)]


def seen(numbers: list[Any], tiles: list[Any]) -> list[Any]:
    """numbers · state, of this thread's two columns."""
    sums = []
    for part in (tiles[::2], tiles[1::2]):
        total = arith.mulf(numbers[0], part[0])
        for x, tile in zip(numbers[1:], part[1:], strict=True):
            total = _fma(x, tile, total)
        for distance in (16, 8, 4):
            total = arith.addf(total, mosaic.shfl_bfly(total, distance))
        sums.append(total)
    return sums


def exp(x: Any) -> Any:
    """e^x with the bits of Triton's: libdevice's way of it."""
    return mosaic.inline_ptx(_EXP, x, result_types=ir.F32Type.get())


def _fma(x: Any, y: Any, z: Any) -> Any:
    text = "fma.rn.f32 $0, $1, $2, $3;"
    return mosaic.inline_ptx(text, x, y, z, result_types=ir.F32Type.get())


_EXP = """{
.reg .f32 a, b;
fma.rn.f32 a, $1, 0f3BBB989D, 0f3F000000;
cvt.sat.f32.f32 a, a;
fma.rm.f32 a, a, 0f437C0000, 0f4B400001;
add.rn.f32 b, a, 0fCB40007F;
neg.f32 b, b;
fma.rn.f32 b, $1, 0f3FB8AA3B, b;
fma.rn.f32 b, $1, 0f32A57060, b;
ex2.approx.ftz.f32 b, b;
.reg .b32 n;
mov.b32 n, a;
shl.b32 n, n, 23;
mov.b32 a, n;
mul.rn.f32 $0, b, a;
}"""
