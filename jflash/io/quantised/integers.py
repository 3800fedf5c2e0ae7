"""compressed-tensors' integers: INT4 and INT8 packed in words, and INT8 as it is.

Packed numbers are stored plus half their range; the zeros of packed weights are packed along the
rows of the weight.
"""

import functools
import math
from collections.abc import Mapping

import numpy as np

from jflash.io.quantised.weight import FLOAT_SCALES, Layout, Stored, floats, unpacked

BITS = (4, 8)


def packed(shape: tuple[int, int], bits: int, group: int, zeros: bool, ordered: bool) -> Layout:
    """A weight in `weight_packed`; `ordered`: the module has `weight_g_idx`."""
    rows, columns = shape
    groups, half = math.ceil(columns / group), 1 << bits - 1
    codes = Stored(
        "weight_packed", (rows, math.ceil(columns * bits / 32)), ("I32",),
        functools.partial(_packed_codes, bits=bits, columns=columns),
    )  # fmt: skip
    zero_points = Stored(
        "weight_zero_point", (math.ceil(rows * bits / 32), groups), ("I32",),
        functools.partial(_packed_zeros, bits=bits), per=32 // bits,
    )  # fmt: skip
    order = Stored("weight_g_idx", (columns,), ("I32", "I64"), _whole, per=0)
    return Layout(
        shape, group, codes, _scales(rows, groups),
        zero_points if zeros else None, order if ordered else None, zero=half,
        form="int4" if bits == 4 else "",
    )  # fmt: skip


def whole(
    shape: tuple[int, int], group: int, found: Mapping[str, tuple[int, ...]], zeros: bool
) -> Layout:
    """A weight of int8, with one scale a tensor, a row, or a group of its columns."""
    rows, columns = shape
    groups = math.ceil(columns / group)
    codes = Stored("weight", shape, ("I8",), _whole)
    scales, zero_points = _scales(rows, groups), None
    if found.get("weight_scale") in ((), (1,)):
        scales = Stored("weight_scale", found["weight_scale"], FLOAT_SCALES, _of_tensor, per=0)
    if zeros:
        of_tensor = {"decode": _of_tensor_whole, "per": 0} if not scales.per else {}
        zero_points = Stored("weight_zero_point", scales.shape, ("I8",), _whole)
        zero_points = zero_points._replace(**of_tensor)
    return Layout(shape, group, codes, scales, zero_points)


def _scales(rows: int, groups: int) -> Stored:
    return Stored("weight_scale", (rows, groups), FLOAT_SCALES, _floats)


def _packed_codes(strip: np.ndarray, outputs: int, bits: int, columns: int) -> np.ndarray:
    return unpacked(strip, bits)[:, :columns]


def _packed_zeros(strip: np.ndarray, outputs: int, bits: int) -> np.ndarray:
    return unpacked(strip.T, bits).T[:outputs]


def _floats(strip: np.ndarray, outputs: int) -> np.ndarray:
    return floats(strip)


def _whole(strip: np.ndarray, outputs: int) -> np.ndarray:
    return strip


def _of_tensor(strip: np.ndarray, outputs: int) -> np.ndarray:
    return np.broadcast_to(floats(strip).reshape(1, 1), (outputs, 1))


def _of_tensor_whole(strip: np.ndarray, outputs: int) -> np.ndarray:
    return np.broadcast_to(strip.reshape(1, 1), (outputs, 1))
