"""Where devices that share the models push what they exchange: leaves of the state, or none.

A program that donates its state holds them as references while it is traced
(jflash.layers.gather); every program of steps does. This file knows no mesh.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jflash.layers.gather import AXIS, pushing
from jflash.pair import Models
from jflash.state import State
from pallas_kernels.gather import Places, empty_places


def over_places(function: Callable, donate: tuple[int, ...], cores: int) -> Callable:
    """`function`, which gathers by the places of a State among its donated arguments. Each device
    has so many multiprocessors."""

    @functools.wraps(function)  # whose arguments' names are the program's
    def with_places(*given: Any) -> Any:
        owners = [i for i in donate if isinstance(given[i], State) and given[i].places is not None]
        if not owners:
            return function(*given)
        [owner], arguments = owners, list(given)
        references = jax.tree.map(jax.new_ref, given[owner].places)
        arguments[owner] = given[owner]._replace(places=None)
        with pushing(references, cores):
            results = function(*arguments)
        places = jax.tree.map(jax.freeze, references)
        return jax.tree.map(
            lambda x: x._replace(places=places) if isinstance(x, State) else x, results,
            is_leaf=lambda x: isinstance(x, State),
        )  # fmt: skip

    return with_places


def landing_places(models: Models) -> Places | None:
    """One device's places for what it exchanges with the others; `models` are its part."""
    pushes = models.kernels.gather == "push"
    return empty_places(models.target.config.shards) if pushes else None


def place_specs(models: Models) -> Any:
    """Where the places lie: each device has its own."""
    own: Any = PartitionSpec(AXIS)
    return Places(own, own, own, own) if models.kernels.gather == "push" else None
