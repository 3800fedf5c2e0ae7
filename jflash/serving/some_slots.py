"""Calls over some of the slots: where few requests step, a call has no rows for the others.

A step of whole blocks of all slots takes as long for one request as for as many as there are slots.
So some numbers of slots have programs of their own, and a call takes the smallest that has a place
for each request that steps: its sequences are taken out of the state and put back after the steps.
A text does not depend on the number, by the law of one arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jflash.kernels import AUTO
from jflash.pair import Models
from jflash.row_choice import row_counts
from jflash.serving.slots import Layout, refusal_of_prompts
from jflash.state import Sequences

# Each is a program for greedy requests and one for others, which take seconds to compile: so none
# for 2 slots, whose step takes 4 % longer than one's (5.42 and 5.23 ms in two runs, Qwen3-8B's
# sizes with a drafter in float8).
COUNTS = (1, 4, 8, 16, 32, 64, 128, 256)
MOST_OF_ALL = 2 / 3  # of the slots: a larger part of them gains too little
CHOSEN_FROM = 256  # rows of whole blocks, from which on fewer of them pay for more programs


class Stepping(NamedTuple):
    """A program of steps: the slots that a call of it serves, and the rows that a step verifies."""

    slots: int
    rows: int


def slot_counts(models: Models, layout: Layout) -> tuple[int, ...]:
    """The numbers of slots that calls may serve, ascending; the last is all of them.

    On a CPU programs take long to compile, several GPUs were not timed, and a state of recurrent
    layers is no row of a sequence: there a call serves all, unless the layout says otherwise.
    """
    batch, wanted = layout.shape.batch, layout.counts
    if wanted is None:
        one_gpu = models.kernels.attention == "canonical" and models.mesh is None
        free = one_gpu and refusal_of_prompts(models) is None
        wanted = [n for n in COUNTS if n <= MOST_OF_ALL * batch] if free else []
    return (*sorted(n for n in set(wanted) if n < batch), batch)


def steppings(models: Models, layout: Layout) -> list[Stepping]:
    """The programs of greedy requests, ascending.

    With AUTO several numbers of rows are there for all slots, and for fewer ones of many rows.
    """
    found, width = list[Stepping](), models.block_size
    for slots in slot_counts(models, layout):
        most = slots * width
        rows = [most if models.rows in (None, AUTO) else min(int(models.rows), most)]
        if models.rows == AUTO and (slots == layout.shape.batch or most >= CHOSEN_FROM):
            rows = row_counts(slots, width)
        found += [Stepping(slots, int(count)) for count in rows]
    return found


def places(live: Sequence[int | None], count: int, batch: int) -> Int[np.ndarray, " n"]:
    """A call's `count` slots as `run` takes them: the live ones, and of the others ~slot.

    All slots lie in their order; of fewer the live ones come first.
    """
    stepping = set(live)
    others = [~slot for slot in range(batch) if slot not in stepping]
    found = np.array([*live, *others], np.int32)  # TypeError: a request without a slot
    if count == batch:
        return found[np.argsort(np.maximum(found, ~found))]
    return found[:count]


def slots_of(given: Int[Array, " n"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """The slots of `places`, and which of them are live."""
    live = given >= 0
    return jnp.where(live, given, ~given), live


def taken(sequences: Sequences, slots: Int[Array, " n"]) -> Sequences:
    """The sequences of some slots."""
    return jax.tree.map(lambda x: x[slots], sequences)


def putting(slots: Int[Array, " n"], batch: int) -> Callable[[Array, Array], Array]:
    """From an array of all slots and one of some, that of all with those rows in it; slots past
    `batch` go nowhere. By masks, because a scatter of each array is a kernel."""
    here = slots == jnp.arange(batch)[:, None]
    which, hit = jnp.argmax(here, axis=1), jnp.any(here, axis=1)

    def put(all: Array, some: Array) -> Array:
        return jnp.where(jnp.expand_dims(hit, range(1, all.ndim)), some[which], all)

    return put
