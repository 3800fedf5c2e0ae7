"""Times of whole steps of several shapes and batches, in one process.

All programs are lowered one by one and compiled side by side, and nothing is timed before the last
is compiled. So twenty numbers take three minutes of an H200, most of them compiling.
"""

import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jflash.bench.case import Task, prepare, task_models
from jflash.bench.in_pages import empty_in_pages, lower_run_in_pages, with_table_of
from jflash.bench.step_cases import PLACES, Case
from jflash.bench.step_time import Window, busy_state, time_run, window_around
from jflash.models.params import decoding_params
from jflash.pair import Models, Params
from jflash.programs import Shape, lower_run, new_state
from jflash.row_choice import with_rows
from jflash.tiles import settled

SLOTS, PAGES, _ = PLACES


class Plan(NamedTuple):
    """What is timed, and how."""

    cases: tuple[Case, ...]
    contexts: tuple[int, ...]
    capacity: int
    steps: int  # of a repeat
    repeats: int

    def window(self, models: Models, context: int) -> Window:
        return window_around(context, self.capacity, models.block_size, self.steps, self.repeats)

    def task(self, case: Case) -> Task:
        return Task(
            shape=case.shape, target=None, drafter=None, batch=case.batch,
            context=self.contexts[0], capacity=self.capacity, widths=(), only_step=True, dtype=None,
            backends={}, steps=self.steps, repeats=self.repeats, prompts=(), max_new_tokens=1,
            stop_token_ids=(), drafter_dtype="float8" if case.kind == "float8" else "",
        )  # fmt: skip


def step_times(
    plan: Plan, note: Callable[[str], Any], compiled: Callable[[], Any]
) -> Iterator[dict[str, Any]]:
    """A row for each case and context: the median milliseconds of a step, and all repeats'.

    `compiled` is called before the first weights are drawn. ValueError for a kind that a pair
    cannot run.
    """
    models = {case: _models(plan, case) for case in plan.cases}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        waited = {}
        for case in plan.cases:
            if _program(case) not in waited:
                waited[_program(case)] = pool.submit(_lowered(plan, case, models[case]).compile)
                note(f"lowered {' '.join(map(str, case))}")
        programs = {case: waited[_program(case)].result() for case in plan.cases}
    note("compiled")
    compiled()
    for same in _with_the_same_weights(plan.cases):
        params = _params(plan, same[0])
        for case in same:
            given = Params(params.target) if case.kind == "plain" else params
            for context in plan.contexts:
                window = plan.window(models[case], context)
                shape, program, empty = Shape.of(case.batch, plan.capacity), programs[case], None
                if case.places != SLOTS:
                    program = with_table_of(program, shape, case.places)
                    empty = empty_in_pages(models[case], shape)
                state = busy_state(models[case], shape, window, empty)
                del empty
                seconds, _ = time_run(program, given, state, window)
                del state, _
                ms = [1e3 * s for s in seconds]
                yield case._asdict() | {
                    "context": context, "ms": statistics.median(ms), "ms_of_repeats": ms,
                }  # fmt: skip
        del params, given
        gc.collect()  # before the next weights are drawn


def _program(case: Case) -> Case:
    """The case whose program this one runs: the order of pages is a run-time value."""
    return case if case.places == SLOTS else case._replace(places=PAGES)


def _models(plan: Plan, case: Case) -> Models:
    models = task_models(plan.task(case))
    if case.rows is not None and not models.one_arithmetic:
        raise ValueError(f"{' '.join(map(str, case))}: kernels here take whole blocks alone")
    models = with_rows(models, case.rows, case.batch)
    return models.plain() if case.kind == "plain" else models


def _lowered(plan: Plan, case: Case, models: Models) -> Any:
    def abstract(config: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.struct, decoding_params(config))

    drafter = None if models.drafter is None else abstract(models.drafter.config)
    params = Params(abstract(models.target.config), drafter)
    shape = Shape.of(case.batch, plan.capacity)
    if case.places != SLOTS:
        return settled(lambda: lower_run_in_pages(models, params, shape))
    state = jax.eval_shape(lambda: new_state(models, shape))
    return settled(lambda: lower_run(models, params, state))


def _with_the_same_weights(cases: Sequence[Case]) -> list[list[Case]]:
    """By shape, those with a drafter in float8 apart."""
    groups: dict[tuple[str, bool], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.shape, case.kind == "float8"), []).append(case)
    return list(groups.values())


def _params(plan: Plan, case: Case) -> Params:
    task = plan.task(case)
    models = task_models(task)
    window = plan.window(models, plan.contexts[0])
    return prepare(task, models, Shape.of(1, plan.capacity), window)[1]
