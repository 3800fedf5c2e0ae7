"""A model over several devices of a host: each device's part of it, and programs over all of them.

Every device runs the same program on its part: some heads, MLP columns and rows of the vocabulary.
Layers gather what a product needs whole (`gather`). Tokens, lengths and logits are the same on
every device. An array's shared axis is the one along which a part is shorter than the whole.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jflash.devices.places import over_places
from jflash.layers.gather import AXIS
from jflash.models.dflash import context_leaves, with_context_kernel
from jflash.models.float8 import heads_of, rounded
from jflash.models.params import decoding_params
from jflash.pair import Models, Params
from jflash.records.decoding import whole
from jflash.records.leaves import Leaf
from jflash.records.parts import (
    FEW_ROWS,
    MANY_ROWS,
    indivisible,
    part_of,
    with_experts_over,
    with_split_outputs,
)
from pallas_kernels.gather import norms

EVERYWHERE: Any = PartitionSpec()  # stands where arrays do


def tensor_mesh(devices: int) -> Mesh | None:
    """The first `devices` local devices in a row, None for one; ValueError if there are fewer."""
    local = jax.local_devices()
    if not 1 <= whole("tensor parallel", devices) <= len(local):
        raise ValueError(f"tensor parallel over {devices} devices: this host has {len(local)}")
    return Mesh(np.asarray(local[:devices]), (AXIS,)) if devices > 1 else None


def shared_mesh(mesh: Mesh | None, devices: int) -> Mesh | None:
    """A user's mesh, of any axes, as devices in a row; without one `tensor_mesh(devices)`.

    ValueError if both name several devices, or if one belongs to another host.
    """
    if mesh is None:
        return tensor_mesh(devices)
    if devices != 1:
        raise ValueError(f"tensor_parallel {devices} beside a mesh: give one of them")
    away = [device for device in mesh.devices.flat if device not in jax.local_devices()]
    if away:
        raise ValueError(f"a mesh of this host's devices shares a pair, not {away[0]}")
    return Mesh(mesh.devices.reshape(-1), (AXIS,))


def over(models: Models, mesh: Mesh | None, experts_over: str = "columns") -> Models:
    """The models shared by a mesh's devices; ValueError naming all that they cannot share.

    `experts_over`: each device has some 'columns' of every expert, or whole ones, over 'devices'.
    """
    if experts_over == "devices" and mesh is None:
        raise ValueError("experts_over 'devices' is for several devices: say how many share them")
    if experts_over == "devices" and not any(config.experts for config in models.configs):
        raise ValueError("experts_over 'devices': no model of the pair has experts")

    def shared(model: Any) -> Any:
        return model and model.clone(config=with_experts_over(model.config, experts_over))

    target, drafter = shared(models.target), shared(models.drafter)
    models = replace(models, target=target, drafter=drafter, mesh=mesh)
    local(models)
    return models


def for_batch(models: Models, batch: int | None) -> Models:
    """The models, whose parts are those that steps of `batch` sequences read soonest, if it is
    known; with their kernels, and with what they keep."""
    pushed = models.mesh is not None and models.kernels.gather == "push"
    if batch is None or not pushed:
        return models
    assert models.mesh is not None
    rows, shards = batch * models.block_size, models.mesh.size

    def suited(model: Any) -> Any:
        config = model.config
        normed = rows >= MANY_ROWS and norms(rows, config.hidden_size // shards, shards)
        if not normed and rows > FEW_ROWS:
            return model
        return model.clone(config=with_split_outputs(config, shards, normed=normed))

    target, drafter = (model and suited(model) for model in (models.target, models.drafter))
    return replace(models, target=target, drafter=drafter)


def local(models: Models) -> Models:
    """One device's part of the models: the models themselves without a mesh."""
    if models.mesh is None:
        return models
    return _local(models)


def check_divisible(models: Models, devices: int, experts_over: str = "columns") -> None:
    """ValueError naming all that so many devices cannot share; asks no device."""
    problems = []
    for name, model in (("target", models.target), ("drafter", models.drafter)):
        if model is not None:
            config = with_experts_over(model.config, experts_over)
            problems += [f"the {name}'s {what}" for what in indivisible(config, devices)]
    if problems:
        raise ValueError(f"{devices} devices cannot share " + "; ".join(dict.fromkeys(problems)))


@functools.lru_cache(maxsize=64)
def _local(models: Models) -> Models:
    assert models.mesh is not None
    shards, parts = models.mesh.size, []
    moes = models.target.config.experts
    check_divisible(models, shards, moes[0].over if moes else "columns")
    for model in (models.target, models.drafter):
        parts.append(model and model.clone(config=part_of(model.config, shards)))
    return replace(models, target=parts[0], drafter=parts[1], mesh=None)


def shared_axis(whole: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """The axis along which a part is shorter, None if every device has the whole array."""
    sizes = zip(whole, part, strict=True)
    axes = [axis for axis, (size, own) in enumerate(sizes) if size != own]
    assert len(axes) <= 1, (whole, part)
    return axes[0] if axes else None


def where_shared(axis: int | None) -> PartitionSpec:
    """Where an array with this shared axis lies."""
    return EVERYWHERE if axis is None else PartitionSpec(*[None] * axis, AXIS)


def specs(models: Models, make: Callable[[Models], Any]) -> Any:
    """Where the arrays of `make(models)` lie; `make` gives one device's of its part."""
    if models.mesh is None:
        return EVERYWHERE
    whole = jax.eval_shape(lambda: make(replace(models, mesh=None)))
    part = jax.eval_shape(lambda: make(local(models)))
    return jax.tree.map(lambda a, b: where_shared(shared_axis(a.shape, b.shape)), whole, part)


def param_specs(models: Models, params: Params) -> Any:
    """Where the parameters lie; the drafter's may be without its context kernel."""
    if models.mesh is None:
        return EVERYWHERE
    part = local(models)
    target = params.target and _leaf_specs(models.target, part.target, params.target)
    drafter = params.drafter and _leaf_specs(models.drafter, part.drafter, params.drafter)
    return Params(target, drafter)


def whole_and_own(model: Any, part: Any) -> tuple[dict, dict]:
    """The leaves that a model decodes with, and one device's of its part, in the same forms.

    The part says how a weight lies: its sizes may not allow fragments where the whole's do.
    """
    own = decoding_params(part.config)
    whole = jax.tree.map(lambda a, b: replace(a, kept=b.kept), decoding_params(model.config), own)
    return whole, own


def _leaf_specs(model: Any, part: Any, given: dict) -> dict:
    whole, own = whole_and_own(model, part)

    def where(a: Leaf, b: Leaf) -> Any:
        if a.fragmented:
            words = shared_axis(a.tiles.words.shape, b.tiles.words.shape)
            return replace(a.tiles, words=where_shared(words))
        if a.kept:
            return a.of_arrays({n: where(part, b.arrays[n]) for n, part in a.arrays.items()})
        return where_shared(shared_axis(a.stored, b.stored))

    return {name: jax.tree.map(where, whole[name], own[name]) for name in given}


def shared(mesh: Mesh | None, function: Callable, takes: Any, gives: Any) -> Callable:
    """`function`, which works on one device's part of everything, over all devices of a mesh.

    `takes` and `gives` say where its arguments and results lie, as `specs` does.
    """
    if mesh is None:
        return function

    @functools.wraps(function)  # whose arguments' names are the program's
    def over_own(*given: Any) -> Any:
        return function(*jax.tree.map(_anew, given))

    return jax.shard_map(over_own, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)


def _anew(x: Array) -> Array:
    """An empty array is made where it is read: as an argument it makes XLA end the process (a
    segmentation fault in jaxlib 0.11.2's `shardy-xla` for GPUs)."""
    return x if x.size else jnp.zeros_like(x)


def spread(
    mesh: Mesh | None, function: Callable, takes: Any, gives: Any, donate: tuple[int, ...] = ()
) -> Any:
    """`shared`, jitted, so that arguments and results lie as `takes` and `gives` say.

    Gathers are pushed to the places of a State that is donated: another's would be copied, and a
    peer may write to the copy before it is made.
    """
    if mesh is None:
        return jax.jit(function, donate_argnums=donate)
    cores = min(getattr(device, "core_count", None) or 0 for device in mesh.devices.flat)
    function = over_places(function, donate, cores)
    lie, lies = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), (takes, gives),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )  # fmt: skip
    function = shared(mesh, function, takes, gives)
    return jax.jit(function, in_shardings=lie, out_shardings=lies, donate_argnums=donate)


def with_context(models: Models, params: Params) -> Params:
    """The parameters with the leaf that makes the context of all drafter layers in one product."""
    drafter = local(models).drafter
    if drafter is None:
        return params
    if models.mesh is None:
        return params._replace(drafter=with_context_kernel(drafter, params.drafter))
    exact = models.drafting_in("")
    [where] = param_specs(exact, Params(None, params.drafter))[1:]
    assert models.drafter is not None
    whole, part = context_leaves(models.drafter.config), context_leaves(drafter.config)
    made = {name: where_shared(shared_axis(whole[name].stored, part[name].stored)) for name in part}

    def extra(own: dict) -> dict:
        return {name: with_context_kernel(drafter, own)[name] for name in part}

    return params._replace(
        drafter=params.drafter | spread(models.mesh, extra, (where,), made)(params.drafter)
    )


def with_rounding(models: Models, params: Params) -> Params:
    """The parameters with the drafter's products rounded, if the models' drafter wants them so.

    A number's rounding hangs on its column alone, so each device rounds what it has.
    """
    drafter = local(models).drafter
    if drafter is None or not drafter.config.products:
        return params
    leaves, target = decoding_params(drafter.config), heads_of(params.target)
    if models.mesh is None:
        return params._replace(drafter=rounded(leaves, params.drafter, target))
    takes = param_specs(models.drafting_in(""), Params(target, params.drafter))
    gives = param_specs(models, Params(None, leaves)).drafter

    def own(given: Params) -> dict:
        return rounded(leaves, given.drafter, given.target)

    round_all = spread(models.mesh, own, (takes,), gives)
    return params._replace(drafter=round_all(Params(target, params.drafter)))
