"""FP8 (e4m3) weights: one scale a tensor, a row or a block; scales multiply, whatever their name.

The kinds: `fp8` (DeepSeek's and Qwen's blocks), `fbgemm_fp8`, `modelopt`, and compressed-tensors'
float-quantized.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jflash.io.hf_values import SIZE, shown
from jflash.io.quantised.weight import FLOAT8, FLOAT8_CODES, FLOAT_SCALES, Layout, Stored, floats

SCALES = (*FLOAT_SCALES, "F8_E8M0", "U8")
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # of modelopt


def block_of(value: Any, key: str) -> tuple[int, int] | None:
    """The rows and columns of a block, of a key that may be absent."""
    if value is None:
        return None
    if type(value) is not list or len(value) != 2 or not all(map(SIZE.holds, value)):
        raise ValueError(f"{key} must be two sizes, rows and columns, got {shown(value)}")
    return value[0], value[1]


def check_fp8(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block of `quant_method` fp8."""
    if (kind := raw.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"fmt {shown(kind)} is not supported, only 'e4m3'")
    if (meant := raw.get("weight_scale_semantics")) is not None:  # GPTQModel's; its codes are W·s
        raise ValueError(f"weight_scale_semantics {shown(meant)}: scales to divide by are not read")
    return block_of(raw.get("weight_block_size"), "weight_block_size")


def check_modelopt(raw: Mapping[str, Any]) -> None:
    """ValueError unless modelopt wrote FP8 with a scale a tensor or a row."""
    inner = raw.get("quantization")
    algorithm = raw.get("quant_algo", inner.get("quant_algo") if type(inner) is dict else None)
    if algorithm not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise ValueError(f"quant_algo {shown(algorithm)} is not supported; supported: {known}")


def layout(
    shape: tuple[int, int], found: Mapping[str, tuple[int, ...]], block: tuple[int, int] | None
) -> Layout:
    """The layout of a weight whose module has tensors of these shapes.

    Without a block, the scale's shape says whether it is the tensor's or has one for each row.
    """
    rows, columns = shape
    names = ("weight_scale_inv", "weight_scale")
    name = next((n for n in names if n in found), names[block is None])
    codes = Stored("weight", shape, FLOAT8_CODES, _codes)
    if block:
        grid = math.ceil(rows / block[0]), math.ceil(columns / block[1])
        decode = functools.partial(_of_blocks, rows=block[0])
        scales = Stored(name, grid, SCALES, decode, per=block[0])
        return Layout(shape, block[1], codes, scales, form="fp8")
    scale = found.get(name, ())
    if scale in ((rows,), (rows, 1)):
        of_rows = Stored(name, scale, SCALES, _of_rows)
        return Layout(shape, columns, codes, of_rows, form="fp8")
    one = scale if scale in ((1,), (1, 1)) else ()
    of_tensor = Stored(name, one, SCALES, _of_tensor, per=0)
    return Layout(shape, columns, codes, of_tensor, form="fp8")


def _codes(strip: np.ndarray, outputs: int) -> np.ndarray:
    return strip.view(FLOAT8)


def _of_blocks(strip: np.ndarray, outputs: int, rows: int) -> np.ndarray:
    return np.repeat(floats(strip), min(rows, outputs), axis=0)[:outputs]


def _of_rows(strip: np.ndarray, outputs: int) -> np.ndarray:
    return floats(strip).reshape(outputs, 1)


def _of_tensor(strip: np.ndarray, outputs: int) -> np.ndarray:
    return np.broadcast_to(floats(strip).reshape(1, 1), (outputs, 1))
