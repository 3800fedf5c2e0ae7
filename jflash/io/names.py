"""Which Hugging Face tensors make up each leaf of our parameters: one rule per name, both ways.

A kernel leaf [in, out] has the transposes of its tensors [out, in] side by side; every other leaf
has its tensors one after the other. A kernel of experts [E, in, out] is such a leaf for each
expert; files have a tensor for each projection of an expert, or one for all experts ("stacked").
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from jflash.config import DeltaSpec, DrafterConfig, TargetConfig
from jflash.io.families import dflash, speculators, trunk
from jflash.io.families.qwen3_5 import DELTA
from jflash.io.families.qwen3_5_moe import SHARED
from jflash.io.families.qwen3_moe import EXPERTS, STACKED
from jflash.io.families.qwen3_next import INPUTS
from jflash.leaves import Leaf
from jflash.models.params import leaf_paths

_LAYER, _TARGET = trunk.LAYER | dflash.CONVOLUTIONS, trunk.TARGET
_DRAFTER = dflash.MODEL | speculators.MODEL
# Tensors of some files that are never read: RoPE tables, the vision tower, layers that predict
# several tokens, and the head of a model that ties it.
_DROPPED = re.compile(r".*rotary_emb\.inv_freq|(model\.)?visual\..*|mtp\..*")


class Source(NamedTuple):
    """A tensor and the shape that its file must give it."""

    name: str
    shape: tuple[int, ...]


def leaf_sources(
    config: TargetConfig | DrafterConfig, stacked: bool = False, by_key_head: bool = False
) -> dict[str, tuple[Source, ...]]:
    """For every leaf, by its path, the tensors that fill it and their shapes in the file.

    `stacked`: the file holds one tensor for all experts of a layer. `by_key_head`: it holds the
    inputs of a delta net by key head.
    """
    forms = (stacked, by_key_head)
    return {path: _sources(config, path, leaf, *forms) for path, leaf in leaf_paths(config).items()}


def _sources(
    config: TargetConfig | DrafterConfig, path: str, leaf: Leaf, stacked: bool, by_key_head: bool
) -> tuple[Source, ...]:
    names = _names(config, path)
    *lead, last = leaf.stored
    if leaf.experts:
        return _expert_sources(path, leaf, names, stacked)
    first, *rest = (last, *lead) if path.endswith("/kernel") else leaf.stored
    rows = leaf.format.columns if leaf.format else (first,)
    if by_key_head and path.endswith("attention/inputs/kernel"):
        names, rows = _named_alike(names[0], INPUTS), (sum(rows[:2]), sum(rows[2:]))
    elif len(rows) > len(names):  # a gate beside the queries is part of their tensor
        rows = (rows[0] + rows[-1], *rows[1:-1])
    return tuple(Source(name, (n, *rest)) for name, n in zip(names, rows, strict=True))


def is_stacked(names: Iterable[str]) -> bool:
    """Whether a file that has tensors of these names holds one for all experts of a layer."""
    return any(name.endswith(tuple(STACKED.values())) for name in names)


def is_by_key_head(names: Iterable[str]) -> bool:
    """Whether a file that has tensors of these names holds a delta net's inputs by key head."""
    return any(name.endswith(INPUTS[0]) for name in names)


def _named_alike(name: str, others: Iterable[str]) -> list[str]:
    """Other tensors of the layer that has a tensor of this name."""
    prefix = name[: name.index("linear_attn.")]
    return [prefix + other for other in others]


def canonical(config: TargetConfig | DrafterConfig, name: str) -> str:
    """A tensor's name as the tables have it.

    Some re-exported drafters prefix every tensor with `model.`, and vision-language models prefix
    those of their text model.
    """
    if isinstance(config, DrafterConfig):
        return name.removeprefix("model.")
    return re.sub(r"^model\.language_model\.", "model.", name)


def is_dropped(config: TargetConfig | DrafterConfig, name: str) -> bool:
    """Whether a tensor without a leaf is known and not needed."""
    if isinstance(config, DrafterConfig) and name in speculators.UNUSED:
        return True
    tied = isinstance(config, TargetConfig) and config.tie_embeddings and name == "lm_head.weight"
    return tied or _DROPPED.fullmatch(name) is not None


def _names(config: TargetConfig | DrafterConfig, leaf: str) -> list[str]:
    target = isinstance(config, TargetConfig)
    match = re.fullmatch(r"layers_(\d+)/(.+)", leaf)
    if match:
        prefix = f"{'model.' if target else ''}layers.{match[1]}."
        sparse = int(match[1]) in config.sparse_layers
        table = _LAYER | EXPERTS | SHARED if sparse else _LAYER
        if isinstance(config.layers[int(match[1])].mixer, DeltaSpec):
            table = table | DELTA
        return [prefix + name for name in table[match[2]]]
    return (_TARGET if target else _DRAFTER)[leaf]


def _expert_sources(path: str, leaf: Leaf, names: list[str], stacked: bool) -> tuple[Source, ...]:
    """The tensors of a leaf [E, in, out], expert by expert; `names` leave {e} open."""
    experts, inputs, outputs = leaf.stored
    if stacked:
        layer, leaf_name = path.split("/", 1)
        prefix = f"model.layers.{layer.removeprefix('layers_')}."
        return (Source(prefix + STACKED[leaf_name], (experts, outputs, inputs)),)
    rows = outputs // len(names)
    return tuple(Source(name.format(e=e), (rows, inputs)) for e in range(experts) for name in names)
