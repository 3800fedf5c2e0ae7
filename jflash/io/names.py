"""Which Hugging Face tensors make up each leaf of our parameters: one rule per name, both ways.

A kernel leaf [in, out] is the transposes of its tensors [out, in] side by side; every other leaf is
its tensors one after the other. Kernels of all experts [E, in, out] hold those of each expert so;
files give a tensor for each of an expert's projections, or one for all experts ("stacked").
"""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jflash.config import DrafterConfig, TargetConfig
from jflash.io.families import dflash, trunk
from jflash.io.families.qwen3_moe import EXPERTS, STACKED
from jflash.kernels import XLA, Kernels
from jflash.models.decoder import Target
from jflash.models.dflash2 import drafter_of

_LAYER, _TARGET, _DRAFTER = trunk.LAYER | dflash.CONVOLUTIONS, trunk.TARGET, dflash.MODEL
# Present in some files and of no use: RoPE tables, and the head of a model that ties it.
_DROPPED = re.compile(r".*rotary_emb\.inv_freq")


class Source(NamedTuple):
    """A tensor and the shape that its file must give it."""

    name: str
    shape: tuple[int, ...]


class _Shapes(NamedTuple):
    """A pass that makes parameters and attends to nothing: the queries are its result."""

    kernels: Kernels = XLA

    def attend(self, spec, projected, cache, sinks=None):
        return projected.split()[0], cache


@functools.cache  # traces the model
def abstract_params(config: TargetConfig | DrafterConfig) -> dict:
    """The parameters as shapes, float32, without allocating anything. Not to be changed."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    over = _Shapes()
    caches = (None,) * config.num_layers
    key = jax.random.key(0)
    if isinstance(config, TargetConfig):
        variables = jax.eval_shape(lambda: Target(config).init(key, tokens, tokens, caches, over))
    else:
        width = len(config.target_layer_ids) * config.hidden_size
        features, x = jnp.zeros((1, 1, width)), jnp.zeros((1, 1, config.hidden_size))
        variables = jax.eval_shape(
            lambda: drafter_of(config).init(
                key, features, x, tokens, caches, over, method="init_all"
            )
        )
    return variables["params"]


def leaf_sources(
    config: TargetConfig | DrafterConfig, stacked: bool = False
) -> dict[str, tuple[Source, ...]]:
    """For every leaf, by its path, the tensors that fill it and their shapes in the file.

    `stacked`: the file holds one tensor for all experts of a layer.
    """
    leaves = jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]
    sources = {}
    for path, leaf in leaves:
        key = "/".join(entry.key for entry in path)
        names = _names(config, key)
        kernel = key.endswith("/kernel")
        if kernel and leaf.ndim == 3:
            sources[key] = _expert_sources(key, leaf.shape, names, stacked)
            continue
        total = leaf.shape[-1] if kernel else leaf.shape[0]
        rest = leaf.shape[:-1] if kernel else leaf.shape[1:]
        sources[key] = tuple(
            Source(name, (rows, *rest))
            for name, rows in zip(names, _rows(config, key, names, total), strict=True)
        )
    return sources


def is_stacked(names: Iterable[str]) -> bool:
    """Whether a file that has tensors of these names holds one for all experts of a layer."""
    return any(name.endswith(tuple(STACKED.values())) for name in names)


def is_dropped(config: TargetConfig | DrafterConfig, name: str) -> bool:
    """Whether a tensor without a leaf is known to be of no use."""
    tied = isinstance(config, TargetConfig) and config.tie_embeddings and name == "lm_head.weight"
    return tied or _DROPPED.fullmatch(name) is not None


def _names(config: TargetConfig | DrafterConfig, leaf: str) -> list[str]:
    target = isinstance(config, TargetConfig)
    match = re.fullmatch(r"layers_(\d+)/(.+)", leaf)
    if match:
        prefix = f"{'model.' if target else ''}layers.{match[1]}."
        sparse = int(match[1]) in config.sparse_layers
        table = _LAYER | EXPERTS if sparse else _LAYER
        return [prefix + name for name in table[match[2]]]
    return (_TARGET if target else _DRAFTER)[leaf]


def _expert_sources(
    leaf: str, shape: tuple[int, ...], names: list[str], stacked: bool
) -> tuple[Source, ...]:
    """The tensors of a leaf [E, in, out], expert by expert; `names` leave {e} open."""
    experts, inputs, outputs = shape
    if stacked:
        layer, own = leaf.split("/", 1)
        prefix = f"model.layers.{layer.removeprefix('layers_')}."
        return (Source(prefix + STACKED[own], (experts, outputs, inputs)),)
    rows = outputs // len(names)
    return tuple(Source(name.format(e=e), (rows, inputs)) for e in range(experts) for name in names)


def _rows(
    config: TargetConfig | DrafterConfig, leaf: str, names: list[str], total: int
) -> list[int]:
    """Output rows of each tensor of a fused leaf."""
    if len(names) == 1:
        return [total]
    if leaf.split("/")[1] != "attention":  # gate and up
        return [total // len(names)] * len(names)
    mixer = config.mixers[int(leaf.split("/")[0].removeprefix("layers_"))]
    return [mixer.num_heads * mixer.head_dim, *[mixer.num_kv_heads * mixer.head_dim] * 2]
