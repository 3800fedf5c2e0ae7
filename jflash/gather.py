"""What devices that share a model exchange: parts of rows, moved and never added.

Every product is split over its columns, so each of `shards` devices has some columns of a row. A
gather lays them side by side; an argmax compares the devices' best. Whole experts are split by
device instead, and rows taken from the device that made them. No sum crosses devices, so the number
of devices changes no bit where a column's product does not depend on the columns beside it.
With one device every function here is the plain one. Only programs inside `shard_map` over AXIS
have more (jflash.mesh).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

AXIS = "tensor"  # of the mesh


def gather(x: Num[Array, "*lead _"], shards: int) -> Num[Array, "*lead _"]:
    """The last axis of all devices, side by side in their order."""
    return x if shards == 1 else lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)


def share[X: Array | None](x: X, shards: int) -> X:
    """This device's part of the last axis of what all devices have."""
    if x is None or shards == 1:
        return x
    width = x.shape[-1] // shards
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * width, width, axis=x.ndim - 1)


def rows_of(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], shards: int
) -> Float[Array, "B T D"]:
    """Rows of a table of which each device has V, in the devices' order.

    Every device reads a row for every token, and each token's is picked from the gathered ones.
    """
    if shards == 1:
        return table[tokens]
    return of_owners(table[tokens % len(table)], tokens // len(table), shards)


def of_owners(
    x: Num[Array, "*lead D"], owner: Int[Array, "*lead"], shards: int
) -> Num[Array, "*lead D"]:
    """Each row from the device that has it; what the others have in its place is not looked at."""
    if shards == 1:
        return x
    return jnp.take_along_axis(lax.all_gather(x, AXIS), owner[None, ..., None], axis=0)[0]


def own_first(ids: Int[Array, "*lead"], held: int, shards: int) -> Int[Array, "*lead"]:
    """The ids counted from this device's first one, if each device has `held` of them."""
    if shards == 1:
        return ids
    return (ids - lax.axis_index(AXIS) * held) % (held * shards)


def best_of(logits: Float[Array, "M V"], shards: int) -> Int[Array, " M"]:
    """The column of the largest of all devices' logits, the lowest of equal ones.

    Devices have V columns each, in their order, so the first device of equal ones has the lowest.
    """
    own = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    value = jnp.take_along_axis(logits, own[:, None], axis=-1)
    id = own[:, None] + logits.shape[-1] * lax.axis_index(AXIS)
    values, ids = gather(value, shards), gather(id, shards)
    return jnp.take_along_axis(ids, jnp.argmax(values, axis=-1)[:, None], axis=-1)[:, 0]
