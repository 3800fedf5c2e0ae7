"""The parameters of a pair before there are any, as the devices that share it will have them.

A program is lowered for them. No weight exists.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jflash.devices.mesh import local, shared_axis, whole_and_own
from jflash.pair import Models, Params
from jflash.records.leaves import Leaf


def param_structs(models: Models) -> Params:
    """Shapes and dtypes of what the models decode with, context weights side by side.

    Where several devices keep one KV head an array is larger than the model's own.
    """
    part = local(models)
    shards = 1 if models.mesh is None else models.mesh.size

    def of(model: Any, own: Any) -> Any:
        if model is None:
            return None
        return jax.tree.map(lambda a, b: _struct(a, b, shards), *whole_and_own(model, own))

    return Params(of(models.target, part.target), of(models.drafter, part.drafter))


def _struct(whole: Leaf, part: Leaf, shards: int) -> Any:
    """All devices' parts of a leaf side by side, or the leaf if each has it whole."""
    if whole.fragmented:
        words = _side_by_side(whole.tiles.words.shape, part.tiles.words.shape, shards)
        return replace(whole.tiles, words=jax.ShapeDtypeStruct(words, jnp.uint32))
    if whole.kept:
        arrays, parts = whole.arrays, part.arrays
        return whole.of_arrays({n: _struct(x, parts[n], shards) for n, x in arrays.items()})
    shape = _side_by_side(whole.stored, part.stored, shards)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(whole.dtype))


def _side_by_side(whole: tuple[int, ...], part: tuple[int, ...], shards: int) -> tuple[int, ...]:
    axis = shared_axis(whole, part)
    return tuple(size * (shards if i == axis else 1) for i, size in enumerate(part))
