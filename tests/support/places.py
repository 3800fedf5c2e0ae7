"""Places to which the devices of a mesh push, described or real."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import DTypeLike

from jflash.layers.gather import AXIS
from pallas_kernels.gather import Places, empty_places

OWN = PartitionSpec(AXIS)
WHERE = Places(OWN, OWN, OWN, OWN)


def described(
    mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike, spec: PartitionSpec
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def described_places(mesh: Mesh) -> Places:
    return _of_all(mesh, lambda shape, dtype: described(mesh, shape, dtype, OWN))


def zeros(mesh: Mesh) -> Places:
    return _of_all(mesh, lambda shape, dtype: put(mesh, np.zeros(shape, dtype), OWN))


def put(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def _of_all(mesh: Mesh, make: Callable[[tuple[int, ...], Any], Any]) -> Places:
    one = jax.eval_shape(lambda: empty_places(mesh.size))
    return jax.tree.map(lambda x: make((len(x) * mesh.size, *x.shape[1:]), x.dtype), one)
