"""Times of whole steps of several shapes and batches, in one process.

All programs are lowered one by one and compiled side by side, and nothing is timed before the last
is compiled. So twenty numbers take three minutes of an H200, most of them compiling.
"""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jflash.bench.floors import Rates
from jflash.bench.kernel_trace import kernels_of
from jflash.bench.steps.case import Task, prepare, task_models
from jflash.bench.steps.cases import PLACES, Case
from jflash.bench.steps.clock import Clock
from jflash.bench.steps.finite import check_timed
from jflash.bench.steps.in_pages import empty_in_pages, lower_run_in_pages, with_table_of
from jflash.bench.steps.time import (
    Window,
    busy_state,
    experts_read,
    rewound,
    routes,
    time_run,
    window_around,
)
from jflash.budget.row_choice import with_rows
from jflash.compiled.programs import lower_run
from jflash.compiled.shape import Shape, new_state
from jflash.compiled.tiles import settled
from jflash.devices.structs import param_structs
from jflash.memory import check_memory
from jflash.pair import Models, Params
from jflash.state import State
from jflash.system.device import device_memory

SLOTS, PAGES, _ = PLACES


class Plan(NamedTuple):
    """What is timed, and how."""

    cases: tuple[Case, ...]
    contexts: tuple[int, ...]
    capacity: int
    steps: int  # of a repeat
    repeats: int
    backends: dict[str, str]  # by the options' names; jflash chooses the others
    kernels: int = 0  # so many of the longest are told, of the first device
    tensor_parallel: int = 1  # devices that share each pair
    experts_over: str = "columns"  # or "devices": what they share of experts

    def window(self, models: Models, context: int) -> Window:
        return window_around(context, self.capacity, models.block_size, self.steps, self.repeats)

    def task(self, case: Case) -> Task:
        return Task(
            shape=case.shape, target=None, drafter=None, batch=case.batch,
            context=self.contexts[0], capacity=self.capacity, widths=(), only_step=True, dtype=None,
            backends=self.backends, steps=self.steps, repeats=self.repeats, prompts=(),
            max_new_tokens=1, stop_token_ids=(), quantised=case.quantised,
            drafter_dtype="float8" if case.kind == "float8" else "",
            tensor_parallel=self.tensor_parallel, experts_over=self.experts_over,
        )  # fmt: skip

    def shape(self, case: Case) -> Shape:
        return Shape.of(case.batch, self.capacity)


def step_times(
    plan: Plan, note: Callable[[str], Any], compiled: Callable[[], Rates]
) -> Iterator[dict[str, Any]]:
    """A row for each case and context: the median milliseconds of a step, all repeats', its floor.

    `compiled` measures the device before the first weights are drawn. ValueError, before anything
    is compiled, for a kind that a pair cannot run and for a pair that the memory does not hold; and
    in place of a row for steps that `check_timed` refuses.
    """
    for case in plan.cases:
        pair = task_models(plan.task(case))
        check_memory(pair, plan.shape(case), max(plan.contexts), device_memory())
    models = {case: _models(plan, case) for case in plan.cases}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        waited = {}
        for case in plan.cases:
            if _program(case) not in waited:
                lowered = _lowered(plan, case, models[case])
                waited[_program(case)] = [pool.submit(program.compile) for program in lowered]
                note(f"lowered {_name(case)}")
        programs = {case: [w.result() for w in waited[_program(case)]] for case in plan.cases}
    note("compiled")
    rates = compiled()
    for same in _with_the_same_weights(plan):
        note(f"drawing the weights of {_name(same[0])}")
        params = _params(plan, same[0])
        for case in same:
            given = Params(params.target) if case.kind == "plain" else params
            for context in plan.contexts:
                window = plan.window(models[case], context)
                shape, (program, *routed), empty = plan.shape(case), programs[case], None
                if case.places != SLOTS:
                    program = with_table_of(models[case], program, shape, case.places)
                    empty = empty_in_pages(models[case], shape)
                state = busy_state(models[case], shape, window, empty)
                del empty
                seconds, state = time_run(program, given, state, window)
                traced: dict[str, Any] = {}
                if plan.kernels:
                    state, traced = _traced(plan, program, given, state, window)
                again, experts = rewound(state, window), None
                if routed:
                    experts = experts_read(models[case], given, again, *routed)
                check_timed(f"{_name(case)} at {context}", models[case], state, experts)
                del state, again
                clock = Clock(models[case], shape, window, rates)
                part = clock.part(seconds, clock.work(models[case], experts), experts)
                where = {"context": context, "backends": models[case].kernels._asdict()}
                yield case._asdict() | where | part | traced
        del params, given
        gc.collect()  # before the next weights are drawn


def _traced(
    plan: Plan, program: Any, params: Params, state: State, window: Window
) -> tuple[State, dict[str, Any]]:
    """The state again, and the kernels of a step: of all the sum, of the longest each."""
    kept = []

    def call() -> State:
        kept.append(time_run(program, params, state, window._replace(repeats=0))[1])
        return kept[0]

    found = kernels_of(call, window.steps)
    longest = [kernel._asdict() for kernel in found[: plan.kernels]]
    return kept[0], {"kernels_ms": sum(k.us for k in found) / 1e3, "kernels": longest}


def _program(case: Case) -> Case:
    """The case whose program this one runs: the order of pages is a run-time value."""
    return case if case.places == SLOTS else case._replace(places=PAGES)


def _models(plan: Plan, case: Case) -> Models:
    models = task_models(plan.task(case))
    if case.rows is not None and not models.one_arithmetic:
        raise ValueError(f"{_name(case)}: kernels here take whole blocks alone")
    models = with_rows(models, case.rows, case.batch)
    return models.plain() if case.kind == "plain" else models


def _lowered(plan: Plan, case: Case, models: Models) -> list[Any]:
    """The case's program; and, of whole blocks in slots, the one that tells the experts read.

    Of devices that share the pair only the first: their floor takes the expected number.
    """
    params, shape = param_structs(models), plan.shape(case)
    if case.places != SLOTS:
        return [settled(lambda: lower_run_in_pages(models, params, shape))]
    state = jax.eval_shape(lambda: new_state(models, shape))
    lowered = [settled(lambda: lower_run(models, params, state))]
    if models.target.config.experts and models.rows is None and models.mesh is None:
        lowered.append(jax.jit(functools.partial(routes, models)).lower(params, state))
    return lowered


def _name(case: Case) -> str:
    """The case as --cases names it."""
    form = f"+{case.quantised}" if case.quantised else ""
    place = f":{case.places}" if case.places != SLOTS else ""
    return f"{case.shape}{form}:{case.batch}:{case.kind}{place}"


def _with_the_same_weights(plan: Plan) -> list[list[Case]]:
    """By the pair's configs, which say how weights lie in memory and what devices share of them;
    both may hang on the batch. Plain decoding takes its pair's target."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in dict.fromkeys(plan.cases):
        groups.setdefault(task_models(plan.task(case)).configs, []).append(case)
    return list(groups.values())


def _params(plan: Plan, case: Case) -> Params:
    task = plan.task(case)
    models = task_models(task)
    window = plan.window(models, plan.contexts[0])
    return prepare(task, models, Shape.of(1, plan.capacity), window)[1]
