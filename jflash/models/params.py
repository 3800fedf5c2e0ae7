"""The parameters of a model as leaves: the one tree that memory, floors, files and checks read.

The modules declare the leaves. This file knows no checkpoint; it also makes random weights.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash.models.decoder import Target
from jflash.models.dflash import Drafter, context_leaves
from jflash.models.float8 import float8_leaves
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.leaves import Leaf, declared
from pallas_kernels.matmul.kept.quantised import MIDDLE

SCALE, EXPERTS_SCALE = 0.02, 0.32  # of random weights
FORGETS = -2.0  # a recurrent state's decay: it lasts some dozens of tokens


@functools.cache
def abstract_params(config: TargetConfig | DrafterConfig) -> dict:
    """The leaves of a model, by the names of its modules. Do not change the result."""
    return _of_dtype(_declared(config), config.dtype)


@functools.cache
def leaf_paths(config: TargetConfig | DrafterConfig) -> dict[str, Leaf]:
    """Every leaf by its path, as declared: a declared dtype holds whatever dtype is loaded."""
    leaves = jax.tree_util.tree_flatten_with_path(_declared(config))[0]
    return {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}


def _declared(config: TargetConfig | DrafterConfig) -> dict:
    leaves = declared(Target(config) if isinstance(config, TargetConfig) else Drafter(config))
    for i, layer in enumerate(config.layers):
        for path, kept in layer.kept:
            *parents, last = f"layers_{i}/{path}".split("/")
            node = functools.reduce(operator.getitem, parents, leaves)
            node[last] = replace(node[last], kept=kept)
    return leaves


def decoding_params(config: TargetConfig | DrafterConfig) -> dict:
    """The leaves that a model decodes with: a drafter's context kernel, and a head, are more."""
    if isinstance(config, TargetConfig):
        return abstract_params(config)
    leaves = abstract_params(config) | _of_dtype(context_leaves(config), config.dtype)
    return float8_leaves(config, leaves) if config.products else leaves


def _of_dtype(leaves: dict, dtype: str) -> dict:
    return jax.tree.map(lambda leaf: replace(leaf, dtype=leaf.dtype or dtype), leaves)


def random_params(config: TargetConfig | DrafterConfig, seed: int) -> dict:
    """Random parameters: normal(0, 0.02), norms 1."""
    return random_weights([config], SCALE, seed)[0]


def random_weights(
    configs: Sequence[TargetConfig | DrafterConfig],
    experts_scale: float = EXPERTS_SCALE,
    seed: int = 0,
    place: Callable[[TargetConfig | DrafterConfig, str, Array], Array] | None = None,
) -> list[dict]:
    """Parameters of each config, normal(0, 0.02) with norms 1, made on the device leaf by leaf.

    The largest leaf comes first: the memory for drawing it is free again before memory fills up.
    `place` takes each leaf, with its config and path, to the devices that share it, so that one
    device never holds more than its part and one whole leaf.

    Experts' down projections are 16 times as large by default, for texts that are decoded. At the
    usual scale the experts' output vanishes beside the attention mean: tokens collapse and one word
    repeats (at a quarter of Qwen3-Coder-30B-A3B's widths, 24 layers and 32 experts: 5 distinct
    tokens in 400; at this scale 380).
    """
    trees = [abstract_params(config) for config in configs]
    pairs, tree = jax.tree_util.tree_flatten_with_path(trees)
    paths, leaves = zip(*pairs, strict=True)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made: dict[int, Any] = {}
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
        leaf = leaves[i]
        if leaf.axes == ("value_heads",):
            made[i] = jnp.full(leaf.stored, FORGETS, leaf.dtype)
        elif len(leaf.stored) == 1:
            made[i] = jnp.ones(leaf.stored, leaf.dtype)
        else:
            scale = experts_scale if leaf.axes == ("experts", "mlp", "embed") else SCALE
            if leaf.kept:
                made[i] = _codes(keys[i], leaf, scale)
            else:
                made[i] = _normal(keys[i], leaf.stored, leaf.dtype, scale)
        if place is not None:
            [model, *path] = paths[i]
            made[i] = place(configs[model.idx], "/".join(key.key for key in path), made[i])
        jax.block_until_ready(made[i])
    return jax.tree.unflatten(tree, [made[i] for i in range(len(leaves))])


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Array, shape: tuple[int, ...], dtype: str, scale: float) -> Array:
    """Compiled whole, so that nothing of it is held in float32."""
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _codes(key: Array, leaf: Leaf, scale: float) -> Any:
    """A kept kernel of random codes of about `scale`; those of four bits are even, a zero is 8."""
    arrays = leaf.arrays
    packed, scales = leaf.kept and leaf.kept.form == "int4", arrays["scales"]
    codes = arrays["codes"].struct
    if packed:
        made = {"codes": jax.random.bits(key, codes.shape, jnp.uint8)}
    else:
        made = {"codes": jax.random.normal(key, codes.shape, jnp.float32).astype(codes.dtype)}
    scale = scale / 21.25**0.5 if packed else scale  # of the numbers -8 … 7
    made["scales"] = jnp.full(scales.stored, scale, scales.dtype)
    if "zeros" in arrays:
        made["zeros"] = jnp.full(arrays["zeros"].stored, MIDDLE, jnp.uint8)
    return leaf.of_arrays(made)
