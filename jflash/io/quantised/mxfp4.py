"""MXFP4 (gpt-oss's experts): numbers of four bits in groups of 32, which share a power of two.

A byte has two numbers, the first in its low bits. bfloat16 has every product of a number and a
usual power of two, so dequantising rounds nothing. e4m3 has the numbers and bfloat16 the powers:
in memory a kept weight is one of FP8, of one byte a number.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from jflash.io.quantised.weight import FLOAT8, Layout, Stored, floats

GROUP = 32
_POSITIVE = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
NUMBERS = np.asarray([*_POSITIVE, *(-x for x in _POSITIVE)], FLOAT8)  # of the 16 codes


def layout(shape: tuple[int, int], found: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of a weight [O, I]; ValueError if I is not in whole groups."""
    rows, columns = shape
    if columns % GROUP:
        raise ValueError(f"weights in MXFP4 have columns in {GROUP}s, not {columns}")
    groups = columns // GROUP
    return Layout(
        shape,
        GROUP,
        Stored("weight_blocks", (rows, groups, GROUP // 2), ("U8",), _numbers),
        Stored("weight_scales", (rows, groups), ("U8",), lambda scales, outputs: floats(scales)),
        form="fp8",
    )


def _numbers(codes: UInt8[np.ndarray, "o G _"], outputs: int) -> np.ndarray:
    """In e4m3 [o, I]."""
    return NUMBERS[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(outputs, -1)
