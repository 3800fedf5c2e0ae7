"""AWQ in the order of its matrix product (`gemm`): a word holds eight neighbouring outputs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jflash.io.hf_values import shown
from jflash.io.quantised.groups import check_words, group_size
from jflash.io.quantised.weight import FLOAT_SCALES, Layout, Stored, floats, unpacked

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output ORDER[i] of its eight
_PLACES = np.argsort(ORDER)


def check(raw: Mapping[str, Any]) -> int:
    """The group size (-1: all inputs)."""
    if raw.get("bits", 4) != 4:
        raise ValueError(f"bits {shown(raw['bits'])} is not supported, only 4")
    kind = str(raw.get("version") or raw.get("format") or "gemm").lower()
    if kind != "gemm":
        raise ValueError(f"version {shown(kind)} is not supported, only 'gemm'")
    if raw.get("zero_point", True) is not True:
        raise ValueError("zero_point: AWQ without zeros is not supported")
    return group_size(raw)


def layout(shape: tuple[int, int], group: int) -> Layout:
    """The layout of a weight."""
    rows, columns = shape
    group = columns if group == -1 else group
    groups = -(-columns // group)
    check_words(shape, 1, 8)
    codes = Stored("qweight", (columns, rows // 8), ("I32",), _nibbles, axis=1, per=8)
    zeros = Stored("qzeros", (groups, rows // 8), ("I32",), _nibbles, axis=1, per=8)
    scales = Stored("scales", (groups, rows), FLOAT_SCALES, _scales, axis=1)
    return Layout(shape, group, codes, scales, zeros, form="int4")


def _nibbles(strip: np.ndarray, outputs: int) -> np.ndarray:
    """[outputs, ·] from words [·, outputs / 8]."""
    words = unpacked(strip, 4).reshape(len(strip), -1, 8)
    return words[:, :, _PLACES].reshape(len(strip), -1).T


def _scales(strip: np.ndarray, outputs: int) -> np.ndarray:
    return floats(strip.T)
