"""The pages that a device's memory has room for, checked before a weight is read.

Weights and state are exact, a program's temporaries an upper estimate; see jflash.memory.
"""

from dataclasses import replace
from typing import NamedTuple

import jax

from jflash.compiled.shape import Shape
from jflash.devices.mesh import local
from jflash.memory import memory_budget, tree_bytes
from jflash.pair import Models
from jflash.serving.calls.constrained import kept_bytes
from jflash.serving.calls.layout import Layout, settled, steps_of_call
from jflash.serving.calls.pass_sizes import engine_chunk, pass_rows
from jflash.serving.calls.slots import empty_state
from jflash.serving.paging.copies import Copy, empty_copies
from jflash.serving.paging.states import states_kept
from jflash.state import State
from pallas_kernels.block_attention import PAGE


class Need(NamedTuple):
    """Bytes on the device: what an engine takes whatever its pages are, and each page."""

    weights: int
    others: int  # slots, copies of their recurrent states, temporaries, a grammar's masks and rows
    page: int

    def of(self, pages: int) -> int:
        return self.weights + self.others + pages * self.page


def needed(
    models: Models, shape: Shape, steps: int | None = None, states: int | None = None
) -> Need:
    """The bytes of an engine of this shape, with `steps` steps a call, which keeps `states` copies
    of recurrent states, as many as `steps_of_call` and `states_kept` say unless given."""
    layout = settled(models, Layout(shape, 1, steps_of_call(models, steps)))

    def state(pages: int) -> int:
        sized = layout._replace(pages=pages)
        return tree_bytes(jax.eval_shape(lambda: empty_state(local(models), sized)))

    page = state(2) - state(1)
    rows = shape._replace(chunk=pass_rows(models, layout))
    budget = memory_budget(replace(models, sampled=True), rows)
    others = state(1) - page + budget.temporaries + kept_bytes(models, layout)
    kept = layout._replace(states=states_kept(models, shape.batch, states))
    others += tree_bytes(jax.eval_shape(lambda: empty_copies(local(models), kept)))
    return Need(budget.weights, others, page)


def need_of(
    models: Models,
    batch: int,
    context: int,
    steps: int | None = None,
    states: int | None = None,
) -> Need:
    """The bytes of an engine for `batch` requests of `context` tokens; others as `needed`."""
    slots = -(-context // PAGE) * PAGE
    return needed(models, Shape.of(batch, slots, chunk=engine_chunk(models, slots)), steps, states)


def pages_within(
    models: Models,
    batch: int,
    context: int,
    pages: int | None,
    limit: int | None,
    steps: int | None = None,
    states: int | None = None,
) -> int:
    """`pages`, or those for `context` tokens in every slot of an engine for `batch` requests, or as
    many as `limit` bytes hold.

    ValueError if the given ones do not fit, or if no request of `context` tokens would; and for
    `states` as `states_kept`.
    """
    columns = -(-context // PAGE)
    longest = Layout(Shape.of(batch, columns * PAGE), pages, 1)
    wanted = settled(models, longest).page_count
    kept = states_kept(models, batch, states)
    if limit is None:
        return wanted
    need = need_of(models, batch, context, steps, kept)
    most = max(0, limit - need.of(0)) // need.page
    takes = (
        f"weights take {_gb(need.weights)}, {batch} slots {_gb(need.others)} and each page of "
        f"{PAGE} tokens {need.page / 1e6:.3g} MB; of the {_gb(limit)} that may be used "
    )
    if pages is not None and pages > most:
        raise ValueError(f"{pages} pages do not fit: {takes}there is room for {most} pages")
    if min(wanted, most) < columns:
        raise ValueError(
            f"a request of {context} tokens needs {columns} pages: {takes}there is room for "
            f"{min(wanted, most)} pages; give fewer tokens of context, a smaller batch or more "
            "pages or memory"
        )
    return min(wanted, most)


def check_room(models: Models, layout: Layout, limit: int | None) -> None:
    """ValueError if the slots, pages and copies of an engine by themselves pass `limit` bytes.

    They are counted exactly, so that nothing is refused that `limit` bytes hold.
    """

    layout = settled(models, layout)

    def held() -> tuple[State, tuple[Copy, ...]]:
        return empty_state(local(models), layout), empty_copies(local(models), layout)

    takes = tree_bytes(jax.eval_shape(held))
    if limit is not None and takes > limit:
        raise ValueError(
            f"max_batch {layout.shape.batch} with {layout.page_count} pages of {PAGE} tokens takes "
            f"{_gb(takes)}, and JAX may use {_gb(limit)}: give a smaller max_batch, "
            "or fewer pages, states or max_stop_ids"
        )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
