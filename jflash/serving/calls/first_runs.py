"""The first runs of an engine's programs of steps, before any request: they are timed, so that a
number of rows may be chosen, and load what they need.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jflash.budget.row_choice import ChosenRows, estimate_for
from jflash.budget.row_times import kept_times, timed, with_texts
from jflash.pair import Models, Params
from jflash.serving.calls.layout import Layout, settled
from jflash.serving.calls.programs import Programs
from jflash.serving.calls.slots import empty_state, sliding, table_columns
from jflash.serving.calls.some_slots import given_slots, places, slot_counts


def choosing(
    models: Models, params: Params, layout: Layout, programs: Programs
) -> dict[int, ChosenRows]:
    """Picks among the greedy programs of each number of slots that has several, by their times
    here and one survey of the drafts."""
    layout = settled(models, layout)
    folder, estimate = jax.config.jax_compilation_cache_dir, estimate_for(models)
    where = Path(folder) if folder else None
    found = {}
    for slots in slot_counts(models, layout):
        runs = {each.rows: run for each, run in programs.greedy.items() if each.slots == slots}
        if len(runs) > 1:
            measure = functools.partial(_times, models, params, layout, runs, slots)
            times = kept_times(models, (layout, slots), [*runs], measure, where)
            found[slots] = ChosenRows(None, runs, times, 0.0, layout.steps, estimate)
    return found


def run_once(models: Models, params: Params, layout: Layout, programs: Programs) -> None:
    """Has each program of steps run, over slots without a text, and waits for it: its first run
    loads its kernels and makes its graphs, for which texts would wait."""
    columns, state = table_columns(models, layout), empty_state(models, layout)
    for slots, program in (
        *((each.slots, program) for each, program in programs.greedy.items()),
        *programs.drawn.items(),
    ):
        n = given_slots(layout, slots)
        given = np.zeros((n, columns), np.int32), places([], n, layout)
        state, _ = program(params, state, *given)
    jax.block_until_ready(state)


def _times(models: Models, params: Params, layout: Layout, runs: dict[int, Any], slots: int):
    """The times of a step of these programs by its rows; see jflash.budget.row_times.timed."""
    columns, window = table_columns(models, layout), sliding(models, layout)
    fewest = min(layout.page_count, window.pages if window else layout.page_count)
    count = given_slots(layout, slots)
    pages = np.arange(count * columns, dtype=np.int32) % fewest
    given = pages.reshape(count, columns), places([*range(slots)], count, layout)
    everyone = layout.shape._replace(batch=layout.slots)
    return timed(
        runs, everyone, layout.steps, with_texts(models, empty_state(models, layout)),
        lambda program, state: program(params, state, *given),
    )  # fmt: skip
