"""compressed-tensors' config: groups of modules, each with the form of its weights.

A module belongs to the group of the target that names it: a name comes before a pattern, patterns
come in the order of their letters, and its class, `Linear`, comes last. The last group with a
target has it.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jflash.io.hf_values import shown
from jflash.io.quantised import fp8, integers
from jflash.io.quantised.groups import group_size
from jflash.io.quantised.weight import Layout

Shapes = Mapping[str, tuple[int, ...]]  # of a module's tensors
Layouts = Callable[[tuple[int, int], Shapes], Layout]  # of a weight's shape
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense")
MOST_REPETITIONS = 4  # in a pattern
_REFUSED = ("sparsity_config", "transform_config")
_STRATEGIES = ("tensor", "channel", "group", "block")


def layouts(raw: Mapping[str, Any]) -> Callable[[Sequence[str]], Layouts | None]:
    """The layouts of a module's weight, by its names; None where no group has the module."""
    for key in _REFUSED:
        value = raw.get(key)
        dense = type(value) is dict and value.get("format") == "dense"  # all weights are there
        if value and not (dense and key == "sparsity_config"):
            raise ValueError(f"{key} {shown(value)} is not supported")
    groups = raw.get("config_groups")
    if type(groups) is not dict or not all(type(group) is dict for group in groups.values()):
        raise ValueError(f"config_groups must be an object of objects, got {shown(groups)}")
    read = [(_targets(group), _layouts(group, raw.get("format"))) for group in groups.values()]
    by_target = {target: form for targets, form in read for target in targets}
    order = sorted(by_target, key=lambda target: (target.startswith("re:"), target))

    def of(modules: Sequence[str]) -> Layouts | None:
        named = (by_target[t] for t in order if any(matches(m, t) for m in modules))
        return next(named, None) or by_target.get("Linear")

    return of


def matches(module: str, target: str) -> bool:
    """Whether a target names a module; those of `re:` are patterns of the name's beginning."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target


def _targets(group: dict[str, Any]) -> list[str]:
    targets = group.get("targets", ["Linear"])
    if type(targets) is not list or not all(type(target) is str for target in targets):
        raise ValueError(f"targets must be a list of names, got {shown(targets)}")
    for target in targets:
        check_pattern(target)
    return targets


def check_pattern(target: str) -> None:
    """ValueError if a target is a pattern that does not compile, or could be searched for ever.

    A search tries every way to share a name among the pattern's repetitions: with one inside
    another their number doubles with each letter.
    """
    if not target.startswith("re:"):
        return
    pattern = target.removeprefix("re:")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shown(target)} is not a pattern: {error}") from None
    plain = re.sub(r"\\.", "", pattern)
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > MOST_REPETITIONS:
        raise ValueError(
            f"{shown(target)} is not supported: a pattern repeats no group, and no more than "
            f"{MOST_REPETITIONS} letters or classes"
        )


def _layouts(group: dict[str, Any], format: Any) -> Layouts:
    form, weights = group.get("format") or format, group.get("weights")
    if form not in FORMATS:
        raise ValueError(f"format {shown(form)} is not supported; supported: {', '.join(FORMATS)}")
    if type(weights) is not dict:
        raise ValueError(f"weights must be an object, got {shown(weights)}")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy {shown(strategy)} is not supported")
    zeros = weights.get("symmetric", True) is False
    if kind == "float" and bits == 8 and strategy != "group" and not zeros:
        block = weights.get("block_structure") if strategy == "block" else None
        return functools.partial(fp8.layout, block=fp8.block_of(block, "block_structure"))
    if kind != "int" or bits not in integers.BITS or strategy == "block":
        what = f"type {shown(kind)}, {shown(bits)} bits, strategy {shown(strategy)}"
        raise ValueError(f"weights of {what}{', with zeros' if zeros else ''} are not supported")
    size = group_size(weights) if strategy == "group" else -1
    # Of the orders of activations this one permutes groups; the others are its older names.
    ordered = str(weights.get("actorder")).lower() in ("group", "dynamic", "true")
    return functools.partial(_integers, bits=bits, size=size, zeros=zeros, ordered=ordered)


def _integers(
    shape: tuple[int, int], found: Shapes, bits: int, size: int, zeros: bool, ordered: bool
) -> Layout:
    group = shape[1] if size == -1 else size
    # Where activations are quantised too, numbers of 4 bits lie in int8 as they are.
    if "weight_packed" in found or (bits != 8 and "weight" not in found):
        return integers.packed(shape, bits, group, zeros, ordered or "weight_g_idx" in found)
    return integers.whole(shape, group, found, zeros)
