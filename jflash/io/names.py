"""What the files of one family call their tensors: one table of names, read both ways.

A kernel leaf [in, out] has the transposes of its tensors [out, in] side by side; every other leaf
has its tensors one after the other. A kernel of experts [E, in, out] is such a leaf for each
expert. This file knows no family: each has its table in `jflash/io/families/`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jflash.models.params import leaf_paths
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.leaves import Leaf
from jflash.records.specs import AttentionSpec, DeltaSpec, DenseSpec, LayerConfig, MoeSpec

Config = TargetConfig | DrafterConfig
Table = dict[str, tuple[str, ...]]  # leaf -> its tensors, in the order of the leaf's parts
ROTARY = r".*rotary_emb\.inv_freq"  # RoPE's table in some files, which is never read


class Source(NamedTuple):
    """A tensor and the shape that its file must give it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The tensors of a family's files: those outside the layers, of every layer, and by its parts.

    A layer's tensors stand without the prefix `layer`. Of experts, "{e}" is the expert's number,
    and a name without it is one tensor for all experts: [E, out, in], or with `inputs_first`
    [E, in, out] unless it is quantised.
    """

    ends: Table
    every: Table
    shared_kv: Table = field(default_factory=dict)  # of attention whose values are the keys
    mixers: dict[type[AttentionSpec | DeltaSpec], Table]
    mlps: dict[type[DenseSpec | MoeSpec], Table]
    stacked: Table = field(default_factory=dict)  # experts in files that have one tensor for all
    inputs_first: bool = False
    layer: str = "model.layers.{i}."
    # Which parts of a fused leaf each tensor holds, where a tensor holds several.
    parts: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    # Column i of a leaf is row order[i] of its tensors, where these lie in another order;
    # it comes from the layer's config.
    orders: dict[str, Callable[..., Int[np.ndarray, " C"] | None]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()  # leaves that a target's `norm_shift` is not missing from
    # Prefixes of some files, each with what stands in the table in its place.
    prefixes: tuple[tuple[str, str], ...] = ()
    dropped: str = ROTARY  # a pattern of tensors that are never read
    predicting: bool = False  # files may hold layers past the last, which predict more tokens

    def canonical(self, name: str) -> str:
        """A tensor's name as the table has it."""
        matching = (pair for pair in self.prefixes if name.startswith(pair[0]))
        theirs, ours = next(matching, ("", ""))
        return ours + name.removeprefix(theirs)

    def spellings(self, name: str) -> tuple[str, ...]:
        """What a tensor or a module may be called: its name in the table, and those in files."""
        pairs = (pair for pair in self.prefixes if name.startswith(pair[1]))
        return name, *(theirs + name.removeprefix(ours) for theirs, ours in pairs)

    def fitting(self, stored: Iterable[str]) -> "Names":
        """The table for a file with tensors of these names: its experts may be in another form."""
        if self.inputs_first and any(name.endswith("_blocks") for name in stored):
            return replace(self, inputs_first=False)
        experts = [name for names in self.stacked.values() for name in names]
        endings = tuple(name + form for name in experts for form in ("", "_packed", "_blocks"))
        if not endings or not any(name.endswith(endings) for name in stored):
            return self
        if self.stacked.keys() <= self.every.keys():  # of experts beside an MLP
            return replace(self, every=self.every | self.stacked)
        return replace(self, mlps=self.mlps | {MoeSpec: self.mlps[MoeSpec] | self.stacked})

    def is_dropped(self, config: Config, name: str) -> bool:
        """Whether a tensor without a leaf is known and not needed."""
        if isinstance(config, TargetConfig) and config.tie_embeddings and name in self.ends["head"]:
            return True
        layer = re.match(self.layer.format(i=r"(\d{1,9})"), name)
        if self.predicting and layer and int(layer[1]) >= config.num_layers:
            return True
        return re.fullmatch(self.dropped, name) is not None

    def of_layer(self, layer: LayerConfig) -> Table:
        """The tensors of one layer, by the leaf's path in it."""
        table = self.every | self.mixers[type(layer.mixer)] | self.mlps[type(layer.mlp)]
        shared = isinstance(layer.mixer, AttentionSpec) and layer.mixer.shared_kv
        return table | self.shared_kv if shared else table


def in_layer(path: str) -> tuple[int | None, str]:
    """The number of a leaf's layer, None outside the layers, and its path there."""
    match = re.fullmatch(r"layers_(\d+)/(.+)", path)
    return (int(match[1]), match[2]) if match else (None, path)


def leaf_sources(config: Config, names: Names) -> dict[str, tuple[Source, ...]]:
    """For every leaf, by its path, the tensors that fill it and their shapes in the file."""
    tables = [names.of_layer(layer) for layer in config.layers]
    sources = {}
    for path, leaf in leaf_paths(config).items():
        i, name = in_layer(path)
        if i is None:
            tensors = names.ends[name]
        else:
            prefix = names.layer.format(i=i)
            tensors = tuple(prefix + tensor for tensor in tables[i][name])
        shapes = _expert_sources if leaf.experts else _sources
        sources[path] = shapes(leaf, tensors, name, names)
    return sources


def _sources(leaf: Leaf, tensors: tuple[str, ...], name: str, names: Names) -> tuple[Source, ...]:
    *lead, last = leaf.stored
    first, *rest = (last, *lead) if name.endswith("/kernel") else leaf.stored
    columns = leaf.format.columns if leaf.format else (first,)
    held = names.parts.get(name, [(part,) for part in range(len(columns))])
    assert sorted(part for parts in held for part in parts) == list(range(len(columns))), name
    rows = [sum(columns[part] for part in parts) for parts in held]
    return tuple(Source(tensor, (n, *rest)) for tensor, n in zip(tensors, rows, strict=True))


def _expert_sources(
    leaf: Leaf, tensors: tuple[str, ...], name: str, names: Names
) -> tuple[Source, ...]:
    """The tensors of a leaf [E, in, out], expert by expert unless one tensor holds all."""
    if names.inputs_first or not name.endswith("/kernel"):
        return (Source(tensors[0], leaf.stored),)
    experts, inputs, outputs = leaf.stored
    if "{e}" not in tensors[0]:
        return (Source(tensors[0], (experts, outputs, inputs)),)
    shape = (outputs // len(tensors), inputs)
    return tuple(Source(name.format(e=e), shape) for e in range(experts) for name in tensors)
