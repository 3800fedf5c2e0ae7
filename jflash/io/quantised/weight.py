"""A quantised weight [O, I] in a file: its tensors, how they are cut, and the numbers they make.

Each format says how its tensors become codes, scales and zeros by row of the weight. The number is
(code − zero)·scale in float32, which the loader rounds once. This file knows no format.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int32, Integer, Num, UInt8

from jflash.io import read_ahead
from jflash.io.read_ahead import Piece
from jflash.records.specs import Kept
from pallas_kernels.matmul.kept.fragments import LARGEST_SCALE

FLOAT_SCALES = ("F32", "BF16", "F16")
FLOAT8_CODES = ("F8_E4M3",)
FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_NUMBERS = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)  # of float8 codes


class Stored(NamedTuple):
    """One tensor of a weight, by what follows the name of its module.

    `decode(strip, outputs)` turns what a strip of `outputs` rows of the weight needs of it into
    rows [outputs, ·].
    """

    suffix: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    decode: Callable[[np.ndarray, int], np.ndarray]
    axis: int = 0  # along which the weight's rows lie
    per: int = 1  # rows of the weight in one line; 0: every strip takes the whole tensor


class Layout(NamedTuple):
    """The tensors of a weight [O, I]; `order` has the group of each column."""

    shape: tuple[int, int]
    group: int  # columns that share a scale
    codes: Stored
    scales: Stored
    zeros: Stored | None = None
    order: Stored | None = None
    zero: int = 0  # where there are no zeros
    form: str = ""  # in which it may stay in memory: "fp8", "int4" or none

    @property
    def tensors(self) -> dict[str, Stored]:
        """All tensors, by name."""
        stored = (self.codes, self.scales, self.zeros, self.order)
        return {each.suffix: each for each in stored if each}

    @property
    def unit(self) -> int:
        """Strips have a multiple of so many rows, except the last."""
        return math.lcm(*(each.per for each in self.tensors.values() if each.per))

    def pieces(self, tensors: Mapping[str, Piece]) -> list[Piece]:
        """The weight as pieces of its rows, decoded to float32 when they are read."""
        (rows, columns), pieces = self.shape, []
        step = max(1, read_ahead.PIECE // (4 * columns) // self.unit) * self.unit
        for first in range(0, rows, step):
            count = min(step, rows - first)
            main, *beside = (
                _strip(tensors[each.suffix], each, first, count) for each in self.tensors.values()
            )
            decode = functools.partial(self._decode, outputs=count, name=main.name)
            pieces.append(main._replace(decode=decode, beside=tuple(beside)))
        return pieces

    def kept(self, scales: np.dtype) -> Kept | None:
        """How the weight may stay in memory, by the scales' stored dtype; its order is ascending.

        None if it may not. Scales of one byte are powers of two, which bfloat16 has.
        """
        columns = self.shape[1]
        if not self.form or columns % 2 or (self.group % 2 and self.group < columns):
            return None
        dtype = "bfloat16" if scales == np.uint8 else scales.name
        return Kept(self.form, min(self.group, columns), dtype, self.zeros is not None)

    def parts(self, tensors: Mapping[str, Piece]) -> dict[str, list[Piece]]:
        """The pieces of a kept weight's arrays: codes [o, I] or, of four bits, [o, I / 2].

        Their reading raises ValueError for what a kept weight may not have.
        """
        (rows, columns), codes = self.shape, self.codes
        step = max(1, read_ahead.PIECE // columns // codes.per) * codes.per
        cuts = [(first, min(step, rows - first)) for first in range(0, rows, step)]
        scales = tensors[self.scales.suffix]
        form = self.kept(scales.dtype)
        narrow = form is not None and form.narrow
        whole = tensors[codes.suffix]
        named = whole.name if narrow and codes.dtypes == FLOAT8_CODES else ""
        read = functools.partial(_codes, codes.decode, packed=self.form == "int4", named=named)
        pieces = {
            "codes": [
                _strip(whole, codes, *cut)._replace(decode=functools.partial(read, outputs=cut[1]))
                for cut in cuts
            ]
        }
        decode = functools.partial(
            _scales, self.scales.decode, outputs=rows, named=scales.name if narrow else ""
        )
        pieces["scales"] = [scales._replace(decode=decode)]
        if self.zeros:
            decode = functools.partial(_zeros, self.zeros.decode, outputs=rows)
            pieces["zeros"] = [tensors[self.zeros.suffix]._replace(decode=decode)]
        return pieces

    def _decode(self, *strips: np.ndarray, outputs: int, name: str) -> Float[np.ndarray, "o I"]:
        stored = self.tensors.values()
        parts = {
            each.suffix: each.decode(strip, outputs)
            for each, strip in zip(stored, strips, strict=True)
        }
        groups = np.arange(self.shape[1]) // self.group
        scales = parts[self.scales.suffix]
        if self.order:
            groups = _checked(parts[self.order.suffix].reshape(-1), scales.shape[1], name)
        zeros = parts[self.zeros.suffix] if self.zeros else None
        return numbers(parts[self.codes.suffix], scales, zeros, groups, self.zero)


def numbers(
    codes: Num[np.ndarray, "o I"],
    scales: Float[np.ndarray, "o G"],
    zeros: Integer[np.ndarray, "o G"] | None,
    groups: Int[np.ndarray, " I"],
    zero: int = 0,
) -> Float[np.ndarray, "o I"]:
    """(code − zero)·scale in float32, with the zero and the scale of each column's group."""
    if codes.dtype == FLOAT8:
        out = np.take(_NUMBERS, codes.view(np.uint8))
    else:
        out = codes.astype(np.float32)
    if zeros is not None:
        out -= np.take(zeros.astype(np.float32), groups, axis=1)
    elif zero:
        out -= zero
    with np.errstate(over="ignore"):  # past float32 a product is infinite, as in torch
        out *= np.take(scales, groups, axis=1)
    return out


def _codes(
    decode: Callable, strip: np.ndarray, outputs: int, packed: bool, named: str
) -> np.ndarray:
    """Codes as they are kept; those of a `named` tensor must be numbers."""
    codes = decode(strip, outputs)
    if named and (codes.view(np.uint8) << 1 == 0xFE).any():
        raise ValueError(
            f"{named} has a NaN, and FP8 is kept with bfloat16's scales if it has none: "
            "use --quantised dequantised"
        )
    return codes[:, ::2] | codes[:, 1::2] << 4 if packed else codes


def _scales(decode: Callable, tensor: np.ndarray, outputs: int, named: str) -> np.ndarray:
    """Scales of all groups; those of a `named` tensor must be such that it may be kept."""
    scales = decode(tensor, outputs)
    if named and (wrong := np.isfinite(scales) & (np.abs(scales) >= LARGEST_SCALE)).any():
        raise ValueError(
            f"{named} has a scale of {scales[wrong][0]:g}, and FP8 is kept with bfloat16's scales "
            f"below {LARGEST_SCALE:g}: use --quantised dequantised"
        )
    return scales


def _zeros(decode: Callable, tensor: np.ndarray, outputs: int) -> np.ndarray:
    return decode(tensor, outputs).astype(np.uint8)


def floats(scales: np.ndarray) -> Float[np.ndarray, "..."]:
    """Scales in float32; those of one byte are powers of two (e8m0)."""
    if scales.dtype == np.uint8:
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
        return np.where(scales == 255, np.float32(np.nan), powers)
    return scales.astype(np.float32)


def unpacked(words: Int32[np.ndarray, "r w"], bits: int) -> UInt8[np.ndarray, "r n"]:
    """The numbers of `bits` bits in rows of int32, the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    parts = [octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(len(words), -1)


def _strip(tensor: Piece, stored: Stored, first: int, count: int) -> Piece:
    if not stored.per:
        return tensor
    begin, end = first // stored.per, math.ceil((first + count) / stored.per)
    return tensor.lines(begin, end - begin, stored.axis)


def _checked(order: Int[np.ndarray, " I"], groups: int, name: str) -> Int[np.ndarray, " I"]:
    if order.min() < 0 or order.max() >= groups:
        raise ValueError(f"{name}: g_idx names groups outside the {groups} that have scales")
    return order
