"""GPTQ: words hold neighbouring inputs of a column, the lowest bits first.

The group of an input is in `g_idx`, which act-order permutes. Format `gptq` stores zeros less 1,
`gptq_v2` as they are. GPTQModel takes the 1s from a whole word, so a zero of 0 borrows from the
next one in the word, and adding them to whole words gives it back.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jflash.io.hf_values import shown
from jflash.io.quantised.groups import check_words, group_size
from jflash.io.quantised.weight import FLOAT_SCALES, Layout, Stored, floats, unpacked

BITS = (2, 4, 8)
LEFT_OUT = "-:"
FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero


def check(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`layout`'s settings: bits, group size (-1: all inputs), what is added to zeros, act-order."""
    if (bits := raw.get("bits")) not in BITS or type(bits) is not int:
        raise ValueError(f"bits {shown(bits)} is not supported; supported: 2, 4, 8")
    kind = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if kind not in tuple(FORMATS) or raw.get("is_marlin_format"):
        raise ValueError(f"checkpoint_format {shown(kind)} is not supported, only gptq, gptq_v2")
    if turned := raw.get("rotation"):  # GPTQModel turns the inputs of down_proj too, as it decodes
        raise ValueError(f"rotation {shown(turned)} is not supported")
    return dict(
        bits=bits, group=group_size(raw), added=FORMATS[kind], ordered=bool(raw.get("desc_act"))
    )


def excluded(raw: Mapping[str, Any]) -> list[str]:
    """Patterns of the modules that `dynamic` leaves out, which GPTQModel marks by "-:".

    ValueError for modules with other settings; an entry without any changes nothing.
    """
    dynamic = raw.get("dynamic") or {}
    if type(dynamic) is not dict:
        raise ValueError(f"dynamic must be an object, got {shown(dynamic)}")
    left_out = [pattern for pattern in dynamic if pattern.startswith(LEFT_OUT)]
    others = [pattern for pattern, own in dynamic.items() if own and pattern not in left_out]
    if others:
        raise ValueError(
            f"dynamic {shown(others[0])}: GPTQ with other settings by module is not supported"
        )
    return [f"re:{pattern.removeprefix(LEFT_OUT)}" for pattern in left_out]


def layout(
    shape: tuple[int, int],
    found: Mapping[str, tuple[int, ...]],
    bits: int,
    group: int,
    added: int,
    ordered: bool,
) -> Layout:
    """The layout of a weight whose module has tensors of these shapes.

    Without act-order files may leave `g_idx` out.
    """
    rows, columns = shape
    group = columns if group == -1 else group
    groups, per = -(-columns // group), 32 // bits
    check_words(shape, per, per)
    codes = Stored(
        "qweight", (columns // per, rows), ("I32",), functools.partial(_codes, bits=bits), axis=1
    )
    zeros = Stored(
        "qzeros", (groups, rows // per), ("I32",),
        functools.partial(_zeros, bits=bits, added=added), axis=1, per=per,
    )  # fmt: skip
    scales = Stored("scales", (groups, rows), FLOAT_SCALES, _scales, axis=1)
    ordered |= "g_idx" in found
    order = Stored("g_idx", (columns,), ("I32",), _order, per=0) if ordered else None
    return Layout(shape, group, codes, scales, zeros, order, form="int4" if bits == 4 else "")


def _codes(strip: np.ndarray, outputs: int, bits: int) -> np.ndarray:
    return unpacked(strip.T, bits)


def _zeros(strip: np.ndarray, outputs: int, bits: int, added: int) -> np.ndarray:
    ones = 0xFFFFFFFF // ((1 << bits) - 1)  # a 1 for every number of a word
    words = strip.view(np.uint32) + np.uint32(added * ones)
    return unpacked(words.view(np.int32), bits).T[:outputs]


def _scales(strip: np.ndarray, outputs: int) -> np.ndarray:
    return floats(strip.T)


def _order(strip: np.ndarray, outputs: int) -> np.ndarray:
    return strip
