"""Whole leaves, brought to the devices that share a model: each device's slices of them.

A leaf's shared axis in memory is one run, or several side by side, such as the queries', keys' and
values' columns; a device has a slice of each. A leaf in fragments is cut between its tiles.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jflash.devices.mesh import EVERYWHERE, shared_axis, where_shared
from jflash.models.params import leaf_paths
from jflash.records.config import DecoderConfig
from jflash.records.leaves import Leaf
from jflash.records.parts import part_of
from pallas_kernels.matmul.kept.fragments import COLUMNS, Fragments
from pallas_kernels.matmul.kept.quantised import Quantised


def placed(mesh: Mesh | None, config: DecoderConfig, params: dict) -> dict:
    """Whole parameters on one device, brought to all devices that share the model."""

    def one(path: Any, leaf: Any) -> Any:
        return place(mesh, config, "/".join(entry.key for entry in path), leaf)

    return jax.tree_util.tree_map_with_path(
        one, params, is_leaf=lambda leaf: isinstance(leaf, Quantised | Fragments)
    )


def place(mesh: Mesh | None, config: DecoderConfig, path: str, leaf: Any) -> Any:
    """A leaf of a model, whole on one device, brought to all devices that share the model.

    The path of an array of a kept kernel ends with its name.
    """
    if mesh is None:
        return leaf
    if isinstance(leaf, Quantised):
        given = {name: getattr(leaf, name) for name in leaf_paths(config)[path].arrays}
        return replace(leaf, **{n: place(mesh, config, f"{path}/{n}", x) for n, x in given.items()})
    whole, part = _leaf_at(config, path), _leaf_at(part_of(config, mesh.size), path)
    if isinstance(leaf, Fragments):
        axis = shared_axis(whole.tiles.words.shape, part.tiles.words.shape)
        runs = _word_runs(whole, axis), _word_runs(part, axis)
        return replace(leaf, words=_placed(mesh, leaf.words, axis, *runs))
    axis = shared_axis(whole.stored, part.stored)
    return _placed(mesh, leaf, axis, _runs(whole, axis), _runs(part, axis))


def _placed(
    mesh: Mesh, array: Array, axis: int | None, whole: tuple[int, ...], own: tuple[int, ...]
) -> Array:
    """An array of the runs `whole` along its shared axis, of each of which a device has `own`."""
    if axis is None:
        return jax.device_put(array, NamedSharding(mesh, EVERYWHERE))
    parts = []
    for i, device in enumerate(mesh.devices.flat):
        part = _part(array, axis, whole, own, mesh.size, i)
        parts.append(jax.device_put(part, device).block_until_ready())
    shape = list(parts[0].shape)
    shape[axis] *= mesh.size
    sharding = NamedSharding(mesh, where_shared(axis))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)


def _leaf_at(config: DecoderConfig, path: str) -> Leaf:
    leaves, (parent, _, name) = leaf_paths(config), path.rpartition("/")
    return leaves[path] if path in leaves else leaves[parent].arrays[name]


def _runs(leaf: Leaf, axis: int | None) -> tuple[int, ...]:
    if axis is None or leaf.runs:
        return leaf.runs
    return leaf.runs_of(1) if axis == len(leaf.stored) - 1 else (leaf.stored[axis],)


def _word_runs(leaf: Leaf, axis: int | None) -> tuple[int, ...]:
    """Of a leaf in fragments: whole experts, or tiles of columns."""
    assert leaf.kept
    words = leaf.tiles.words.shape
    if axis is None or axis != len(words) - 4:
        return () if axis is None else (words[axis],)
    return (words[axis],) if leaf.kept.pairs else leaf.runs_of(COLUMNS)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _part(
    leaf: Array, axis: int, whole: tuple[int, ...], own: tuple[int, ...], shards: int, index: int
) -> Array:
    """Device `index`'s slice of each run: several devices' the same, if they are fewer slices."""
    slices, first = [], 0
    for all_columns, columns in zip(whole, own, strict=True):
        start = first + index * all_columns // (shards * columns) * columns
        slices.append(jax.lax.slice_in_dim(leaf, start, start + columns, axis=axis))
        first += all_columns
    return jnp.concatenate(slices, axis=axis)
