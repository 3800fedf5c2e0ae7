"""Sizes of AWQ and GPTQ: of a group of inputs that share a scale, and of words."""

from collections.abc import Mapping
from typing import Any

from jflash.io.hf_values import SIZE, shown


def group_size(raw: Mapping[str, Any], key: str = "group_size") -> int:
    """The size of a group; -1 means all inputs."""
    size = raw.get(key, 128)
    if size != -1 and (not SIZE.holds(size) or size % 8):
        raise ValueError(f"{key} must be -1 or a multiple of 8, got {shown(size)}")
    return size


def check_words(shape: tuple[int, int], inputs: int, outputs: int) -> None:
    """ValueError unless so many inputs and so many outputs, which share a word, divide [O, I]."""
    if shape[0] % outputs or shape[1] % inputs:
        raise ValueError(f"a weight {shape} does not fill words of {max(inputs, outputs)} numbers")
