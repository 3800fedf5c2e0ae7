"""Calls over some of the slots: where few requests step, a call has no rows for the others.

A step of whole blocks of all slots takes as long for one request as for as many as there are slots.
So some numbers of slots have programs of their own, and a call takes the smallest that has a place
for each request that steps: its sequences are taken out of the state and put back after the steps.
Where more requests are there than step at once, the device takes the first that have not ended.
A text does not depend on any of this, by the law of one arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jflash.budget.row_choice import row_counts
from jflash.pair import Models
from jflash.records.kernels import AUTO
from jflash.serving.calls.layout import Layout, takes_some

# Each is a program for greedy requests and one for others, which take seconds to compile: so none
# for 2 slots, whose step takes 4 % longer than one's (5.42 and 5.23 ms in two runs, Qwen3-8B's
# sizes with a drafter in float8).
COUNTS = (1, 4, 8, 16, 32, 64, 128, 256)
BETWEEN = (24, 48, 96, 192)  # if all rows are verified; where rows are chosen, they cost more
MOST_OF_ALL = 3 / 4  # of the slots: a larger part of them gains too little
CHOSEN_FROM = 256  # rows of whole blocks, from which on fewer of them pay for more programs


class Stepping(NamedTuple):
    """A program of steps: the slots that a call of it serves, and the rows that a step verifies."""

    slots: int
    rows: int


def slot_counts(models: Models, layout: Layout) -> tuple[int, ...]:
    """The numbers of slots that calls may serve, ascending; the last is of as many as step at once,
    and the only one where `takes_some` is false, unless the layout says otherwise."""
    batch, wanted = layout.shape.batch, layout.counts
    if wanted is None:
        some = COUNTS if models.rows == AUTO else (*COUNTS, *BETWEEN)
        wanted = [n for n in some if n <= MOST_OF_ALL * batch] if takes_some(models) else []
    return (*sorted(n for n in set(wanted) if n < batch), batch)


def steppings(models: Models, layout: Layout) -> list[Stepping]:
    """The programs of greedy requests, ascending.

    With AUTO several numbers of rows are there for all slots, and for fewer ones of many rows, or
    of any where each row reads experts of its own.
    """
    found, width = list[Stepping](), models.block_size
    chosen_from = width if models.target.config.experts else CHOSEN_FROM
    for slots in slot_counts(models, layout):
        most = slots * width
        rows = [most if models.rows in (None, AUTO) else min(int(models.rows), most)]
        if models.rows == AUTO and (slots == layout.shape.batch or most >= chosen_from):
            rows = row_counts(slots, width)
        found += [Stepping(slots, int(count)) for count in rows]
    return found


def given_slots(layout: Layout, count: int) -> int:
    """The slots that a call is given which steps `count` of them; the layout is settled."""
    return min(count + layout.slots - layout.shape.batch, layout.slots)


def places(live: Sequence[int | None], given: int, layout: Layout) -> Int[np.ndarray, " {given}"]:
    """`given` slots as a call takes them: the live ones in their order, and of the others ~slot. If
    there are no more slots than step at once, all lie in the slots' order.
    """
    stepping = set(live)
    others = [~slot for slot in range(layout.slots) if slot not in stepping]
    found = np.array([*live, *others], np.int32)  # TypeError: a request without a slot
    if given == layout.shape.batch == layout.slots:
        return found[np.argsort(np.maximum(found, ~found))]
    return found[:given]


def slots_of(given: Int[Array, " n"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """The slots of `places`, and which of them are live."""
    live = given >= 0
    return jnp.where(live, given, ~given), live


def first_of(able: Bool[Array, " n"], count: int) -> Int[Array, " {count}"]:
    """The first `count` that are able, and the first others if there are fewer. By masks: a sort is
    a kernel of its own."""
    before = jnp.cumsum(able) - able
    others = jnp.sum(able) + jnp.cumsum(~able) - 1
    place = jnp.where(able, before, others)
    return jnp.argmax(place == jnp.arange(count)[:, None], axis=1)


def taken[T](of_all: T, slots: Int[Array, " n"]) -> T:
    """What some slots have of arrays of all."""
    return jax.tree.map(lambda x: x[slots], of_all)


def putting(slots: Int[Array, " n"], batch: int) -> Callable[[Array, Array], Array]:
    """From an array of all slots and one of some, that of all with those rows in it; slots past
    `batch` go nowhere. By masks, because a scatter of each array is a kernel."""
    here = slots == jnp.arange(batch)[:, None]
    which, hit = jnp.argmax(here, axis=1), jnp.any(here, axis=1)

    def put(all: Array, some: Array) -> Array:
        return jnp.where(jnp.expand_dims(hit, range(1, all.ndim)), some[which], all)

    return put
