"""What a checkpoint's tensors must be, by name, and every problem of those that a file has."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jflash.io.names import Source
from jflash.io.quantised.scheme import PLAIN
from jflash.io.quantised.tensors import Weight

WHOLE = {"d2t": ("I64", "I32")}  # tensors of ids


class Tensor(NamedTuple):
    """A tensor in a file, by the name that it has there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Expected(NamedTuple):
    """The shape of a tensor, and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


Owners = dict[str, list[Tensor]]  # the tensors of each name: one, unless it is given twice


def expected_tensors(
    sources: Mapping[str, Sequence[Source]], weights: Mapping[str, Weight]
) -> dict[str, Expected]:
    """The tensors of all leaves, those of quantised weights in place of what they make."""
    expected = {}
    for part in (part for parts in sources.values() for part in parts):
        if part.name not in weights:
            expected[part.name] = Expected(part.shape, WHOLE.get(part.name, PLAIN))
            continue
        for name, stored in weights[part.name].tensors:
            expected[name] = Expected(stored.shape, stored.dtypes)
    return expected


def tensor_problems(
    expected: Mapping[str, Expected], owners: Owners, is_dropped: Callable[[str], bool]
) -> list[str]:
    """Every tensor that is missing, unknown, given twice, or of another shape or dtype."""
    problems = [f"missing: {name}" for name in expected if name not in owners]
    for name, tensors in owners.items():
        if name not in expected:
            if not is_dropped(name):
                problems.append(f"unknown: {name}")
            continue
        if len(tensors) > 1:
            where = ", ".join(f"{tensor.name} in {tensor.file.name}" for tensor in tensors)
            problems.append(f"given twice: {name} ({where})")
        shape, dtype = tensors[0].shape, tensors[0].dtype
        if shape != expected[name].shape:
            problems.append(f"wrong shape: {name} is {shape}, expected {expected[name].shape}")
        if dtype not in expected[name].dtypes:
            problems.append(f"unsupported dtype: {name} is {dtype}")
    return problems
