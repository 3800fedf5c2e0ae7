"""The quantised weights among a checkpoint's tensors.

A weight's tensors have its module's name and a suffix. Experts in one tensor [E, O, I] have no
module each: the suffix's ending follows the tensor's name.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jflash.io.problems import check_problems
from jflash.io.quantised.scheme import PLAIN, UNREAD, Scheme
from jflash.io.quantised.weight import Layout, Stored
from jflash.io.read_ahead import Piece, read
from jflash.records.specs import Kept

PACKED = ("weight_packed", "qweight")
FORMS = ("weight", *PACKED, "weight_scale", "weight_scale_inv", "g_idx", "weight_g_idx")
FORMS += ("weight_blocks", "weight_scales")


class Header(NamedTuple):
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


class Weight(NamedTuple):
    """A quantised weight [O, I], or one such for each of E experts; E is 0 for a single one."""

    source: str
    layout: Layout
    experts: int

    @property
    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Its tensors by name, each with the shape that the file must give it."""
        lead = (self.experts,) if self.experts else ()
        for suffix, stored in self.layout.tensors.items():
            yield named(self.source, suffix), stored._replace(shape=(*lead, *stored.shape))

    def kept(self, places: Mapping[str, Piece]) -> Kept | None:
        """How the weight may stay in memory; None if it may not, or if a tensor is missing."""
        tensors = {s: places.get(named(self.source, s)) for s in self.layout.tensors}
        scales, order = tensors[self.layout.scales.suffix], self.layout.order
        if None in tensors.values() or scales is None:
            return None
        if order and (stored := tensors[order.suffix]) is not None:
            groups = np.arange(self.layout.shape[1]) // self.layout.group
            if stored.shape[-1:] != groups.shape or (read(stored) != groups).any():
                return None
        return self.layout.kept(scales.dtype)

    def parts(self, places: Mapping[str, Piece]) -> dict[str, list[Piece]]:
        """The pieces of a kept weight's arrays, one expert after the other."""
        each = [self.layout.parts(tensors) for tensors in self._each(places)]
        return {name: [piece for one in each for piece in one[name]] for name in each[0]}

    def pieces(self, places: Mapping[str, Piece]) -> list[Piece]:
        """Its pieces, one expert after the other."""
        return [p for tensors in self._each(places) for p in self.layout.pieces(tensors)]

    def _each(self, places: Mapping[str, Piece]) -> Iterator[dict[str, Piece]]:
        """The tensors by suffix: of each expert, or of the single weight."""
        tensors = {suffix: places[named(self.source, suffix)] for suffix in self.layout.tensors}
        if not self.experts:
            yield tensors
        for e in range(self.experts):
            yield {suffix: _expert(tensor, e) for suffix, tensor in tensors.items()}


def only(name: str) -> tuple[str, ...]:
    return (name,)


def find_weights(
    scheme: Scheme | None,
    shapes: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, Header],
    spellings: Callable[[str], tuple[str, ...]] = only,
) -> dict[str, Weight]:
    """The quantised ones of the weights with these names and shapes.

    The scheme may mean a module by any of its `spellings`. ValueError for one that it leaves out.
    """
    weights = {}
    for source, shape in shapes.items() if scheme else ():
        found = {s: headers[n] for s in FORMS if (n := named(source, s)) in headers}
        plain = "weight" in found and found["weight"].dtype in PLAIN
        if not found or plain or len(shape) < 2:
            continue
        assert scheme
        experts = shape[0] if len(shape) == 3 else 0
        seen = {suffix: header.shape[bool(experts) :] for suffix, header in found.items()}
        modules = spellings(source.removesuffix(".weight"))
        layout = scheme.layout(modules, (shape[-2], shape[-1]), seen)
        weights[source] = Weight(source, layout, experts)
    return weights


def named(source: str, suffix: str) -> str:
    """The name of a tensor of the weight that is called `source` where it is not quantised."""
    if source.endswith(".weight"):
        return source.removesuffix("weight") + suffix
    return source + suffix.removeprefix("weight")


def is_spare(name: str, weights: Mapping[str, Weight], scaled: bool) -> bool:
    """Whether a tensor of a quantised checkpoint is known and fills no leaf.

    `scaled`: some belong to activations or caches, with or without such weights. AutoGPTQ writes
    a bias for every module, of zeros where the model has none.
    """
    return (scaled and name.endswith(UNREAD)) or _is_zero_bias(name, weights)


def check_biases(path: Path, spare: Mapping[str, Piece], weights: Mapping[str, Weight]) -> None:
    """ValueError if a bias that fills no leaf has numbers other than 0."""
    biases = [name for name in spare if _is_zero_bias(name, weights)]
    wrong = [name for name in biases if read(spare[name]).any()]
    check_problems(path, [f"unknown: {name}, and not zero" for name in wrong])


def _is_zero_bias(name: str, weights: Mapping[str, Weight]) -> bool:
    module, _, last = name.rpartition(".")
    weight = weights.get(f"{module}.weight")
    return last == "bias" and weight is not None and "qweight" in weight.layout.tensors


def _expert(tensor: Piece, e: int) -> Piece:
    one = tensor.lines(e, 1)
    return one._replace(shape=tensor.shape[1:])
