"""New parameters in the place of old ones: what does not fit is refused before an engine takes it.

This file knows trees of arrays, and no engine.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jflash.devices.mesh import with_context
from jflash.models.dflash import context_leaves
from jflash.pair import Models, Params


def replacing(old: Any, new: Any, name: str) -> Any:
    """The new parameters of the model called `name`, where the old ones lie.

    Arrays that lie there are taken as they are, others are copied: NumPy's always, for their owner
    may write into them. ValueError, naming the first leaf that does not fit, for another tree,
    shape or dtype, for an array whose memory was given away, and for one of which each device of
    several would not have its part already: a whole model's columns may have another order.
    """
    if old is None:
        raise ValueError(f"new parameters of the {name}: the engine's pair has none")
    olds, news = (dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in (old, new))
    for path in (*olds, *news):
        if not (path in olds and path in news):
            there = "is missing" if path in olds else "is none of the engine's"
            raise ValueError(f"new parameters of the {name}: {keystr(path) or type(new)} {there}")
    for path, leaf in news.items():
        if wrong := _refusal(leaf, olds[path]):
            raise ValueError(f"new parameters of the {name}: {keystr(path)} {wrong}")
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(f"new parameters of the {name}: {type(new)} is not the engine's tree")
    return jax.tree.map(_placed, new, old)


def replacing_drafter(models: Models, old: Any, new: Any) -> Any:
    """The same of the models' drafter, whose context kernel repeats columns of its layers' kernels.

    It is made of the new ones, and what `new` has of it is not read: it may be of the old ones.
    Where products are rounded `new` has all, as rounded.
    """
    config = None if models.drafter is None else models.drafter.config
    made = set() if config is None or config.products else set(context_leaves(config))
    if not isinstance(old, Mapping) or not made & set(old):
        return replacing(old, new, "drafter")
    if isinstance(new, Mapping):
        new = {name: leaf for name, leaf in new.items() if name not in made}
    old = {name: leaf for name, leaf in old.items() if name not in made}
    given = replacing(old, new, "drafter")
    return with_context(models, Params(None, given)).drafter


def _refusal(leaf: Any, old: Any) -> str | None:
    """Why an array cannot stand for the old one."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return f"is no array but {leaf!r:.80}"
    if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
        return f"is {leaf.dtype}{[*leaf.shape]}, not {old.dtype}{[*old.shape]}"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "was deleted, or donated to another program"
    if _in_parts(old) and not (
        isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(old.sharding, old.ndim)
    ):
        return (
            f"does not lie in parts on the engine's {len(old.sharding.device_set)} devices: load "
            "the model with the same tensor_parallel or mesh"
        )
    return None


def _in_parts(old: Any) -> bool:
    """Whether several devices have other parts of an array. Its columns are in their order, which
    the shape does not tell."""
    return isinstance(old, jax.Array) and not old.sharding.is_fully_replicated


def _placed(leaf: Any, old: Any) -> jax.Array:
    where = old.sharding if isinstance(old, jax.Array) else None  # a pair may be of NumPy's arrays
    if isinstance(leaf, np.ndarray):
        leaf = leaf.copy()  # a CPU's array would be the same memory
    elif leaf.sharding == where:
        return leaf  # `device_put` may copy it
    return jax.device_put(leaf, where)
