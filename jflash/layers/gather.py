"""What devices that share a model exchange: parts of rows, moved and never added.

Every product is split over its columns, so each of `shards` devices has some columns of a row. A
gather lays them side by side; an argmax compares the devices' best. Whole experts are split by
device instead, and rows taken from the device that made them. No sum crosses devices, so the number
of devices changes no bit where a column's product does not depend on the columns beside it; but for
how sure a drafter is of its best drafts, on which no text depends.
With one device every function here is the plain one. Only programs inside `shard_map` over AXIS
have more (jflash.devices.mesh). Like the axis, the places to which such a program's kernels push
their parts are the program's: `pushing` names them while it is traced.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import gather as gather_op
from pallas_kernels.gather import Places
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul import Unsummed, summed
from pallas_kernels.matmul.pushed import gated

AXIS = "tensor"  # of the mesh
_PLACES: contextvars.ContextVar[Places | None] = contextvars.ContextVar("places", default=None)
_CORES: contextvars.ContextVar[int] = contextvars.ContextVar("cores", default=0)


@contextlib.contextmanager
def pushing(places: Places, cores: int = 0) -> Iterator[None]:
    """Gathers are pushed to these places, which are references, while the program is traced. Each
    device has so many multiprocessors; with 0 nothing rests on their number."""
    tokens = _PLACES.set(places), _CORES.set(cores)
    try:
        yield
    finally:
        _PLACES.reset(tokens[0])
        _CORES.reset(tokens[1])


def gather(x: Num[Array, "*lead _"], shards: int) -> Num[Array, "*lead _"]:
    """The last axis of all devices, side by side in their order."""
    return x if shards == 1 else gather_op.gather(x, AXIS, _PLACES.get())


def gather_sum(sums: Unsummed, shards: int) -> Float[Array, "*lead _"]:
    """`gather` of what a product without a residual leaves unmade."""
    pieces, whole = sums
    if shards == 1 or pieces is None:
        return gather(summed(sums), shards)
    assert whole is None, "a residual is not of this device's columns alone"
    return gather_op.gather_sum(pieces, AXIS, _PLACES.get())


def norms(rows: int, columns: int, shards: int) -> bool:
    """Whether `gather_normed` takes so many columns of each device."""
    return _PLACES.get() is not None and gather_op.norms(rows, columns, shards)


def gather_normed(
    own: Unsummed, residual: Float[Array, "*lead D"], scale: Float[Array, " D"], eps: float
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"]]:
    """The residual plus all devices' columns, and its norm, by one kernel (see `norms`)."""
    columns = own.residual if own.pieces is None else own.pieces
    assert columns is not None
    return gather_op.gather_normed(columns, residual, scale, eps, AXIS, _PLACES.get())


def gated_product(
    x: Float[Array, "*lead D"], gate_up: Any, firsts: Firsts | None, down: Any, columns: int
) -> Unsummed | None:
    """All of an MLP but its last gather, by one kernel that exchanges rows on its way; None where
    two products and a gather do it. Arguments as `gated`'s."""
    places, (*lead, D) = _PLACES.get(), x.shape
    if places is None:
        return None
    where: dict[str, Any] = {"places": places, "axis": AXIS, "cores": _CORES.get()}
    own = gated(x.reshape(-1, D), gate_up, down, firsts, columns=columns, **where)
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-2], *lead, part.shape[-1]), own)


def gather_if_read(x: Num[Array, "*lead _"], shards: int) -> Num[Array, "*lead _"]:
    """`gather` for what may go unread: a push is never left out, and XLA's gather is."""
    return x if shards == 1 else gather_op.gather(x, AXIS)


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
    parts = gather(x, shards).reshape(*x.shape[:-1], shards, x.shape[-1])
    return jnp.take_along_axis(parts, owner[..., None, None], axis=-2)[..., 0, :]


def own_first(ids: Int[Array, "*lead"], held: int, shards: int) -> Int[Array, "*lead"]:
    """The ids counted from this device's first one, if each device has `held` of them."""
    if shards == 1:
        return ids
    return (ids - lax.axis_index(AXIS) * held) % (held * shards)


def best_of(
    ids: Int[Array, " M"], logits: Float[Array, " M"], held: int, shards: int
) -> Int[Array, " M"]:
    """Of each device's best column and its logit the best of all, the lowest of equal ones.

    Devices have `held` columns each, in their order, so the first device of equal ones has the
    lowest.
    """
    columns, every = _of_all(ids, (logits,), shards)
    return _best(columns, every, held)


def surest_of(
    ids: Int[Array, " M"],
    logits: Float[Array, " M"],
    sums: Float[Array, " M"],
    held: int,
    shards: int,
) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    """`best_of`, and the sum of exp(logit - best) over all devices' columns, of each one's own."""
    if shards == 1:
        return ids, sums
    columns, every, sums = _of_all(ids, (logits, sums), shards)
    largest = jnp.max(every, axis=-1, keepdims=True)
    return _best(columns, every, held), jnp.sum(sums * jnp.exp(every - largest), axis=-1)


def _of_all(
    ids: Int[Array, " M"], numbers: tuple[Float[Array, " M"], ...], shards: int
) -> list[Num[Array, "M {shards}"]]:
    """The ids and the numbers of all devices, by one gather."""
    ids, numbers = lax.optimization_barrier((ids, numbers))  # or XLA finds them by a thread a row
    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in numbers]
    together = jnp.stack([ids, *bits], axis=-1)
    of_all = gather(together, shards).reshape(len(ids), shards, -1)
    every = [of_all[..., i + 1] for i in range(len(numbers))]
    return [of_all[..., 0], *(lax.bitcast_convert_type(x, jnp.float32) for x in every)]


def _best(columns: Int[Array, "M n"], every: Float[Array, "M n"], held: int) -> Int[Array, " M"]:
    best = jnp.argmax(every, axis=-1)
    return best * held + jnp.take_along_axis(columns, best[:, None], axis=-1)[:, 0]
