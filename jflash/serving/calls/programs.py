"""The engine's executables: those of a prompt, and calls of a number of steps.

Keys and values lie in pools of pages, and every call brings the page table. The host uploads and
reads one array a call. Nothing here knows a queue.
"""

import functools
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jflash.budget.row_choice import ChosenRows, estimate_for
from jflash.budget.row_times import kept_times, timed, with_texts
from jflash.compiled.stored import compiling
from jflash.devices.mesh import EVERYWHERE, local, param_specs, spread
from jflash.pair import Models, Params
from jflash.records.kernels import AUTO
from jflash.serving.calls import prefill
from jflash.serving.calls.layout import KINDS, Kind, Layout, pass_sizes, settled, several_prompts
from jflash.serving.calls.packing import CONTROL, Report, mask_words, report_of, row_size
from jflash.serving.calls.slots import empty_state, sliding, state_specs, table_columns, with_table
from jflash.serving.calls.some_slots import (
    Stepping,
    first_of,
    given_slots,
    places,
    putting,
    slot_counts,
    slots_of,
    steppings,
    taken,
)
from jflash.speculative import speculative_step
from jflash.state import State

DRAWN = ("shaping", "logprobs", "best_drafts")  # of Sequences; greedy programs read none


class Programs(NamedTuple):
    """Executables of one layout. `state` is donated, and its paged layers have no table.

    chunk[size](params, state, given) -> (state, computed)
    whole[prompts, size](params, state, given) -> (state, first)
    first[kind](params, sequences, newest, control, allowed) -> (sequences, first); donates too
    score[size](params, hidden, following) -> (chosen, tops)
    greedy[stepping], drawn[slots] (params, state, table, slots) -> (state, report)

    `chunk` has a program for each number of tokens that a pass computes, `whole` too for one
    prompt, and those of `several_prompts`; `greedy` one for each of `steppings`, and `drawn` for
    each of `slot_counts`, which verifies all rows and serves requests of every kind. `whole` is
    there with `greedy`. Of `greedy` and `drawn` only the layout's kinds are there.
    """

    chunk: dict[int, Any]
    whole: dict[tuple[int, int], Any]
    first: dict[Kind, Any]
    score: dict[int, Any]
    greedy: dict[Stepping, Any]
    drawn: dict[int, Any]


def run(
    models: Models,
    steps: int,
    count: int,
    params: Params,
    state: State,
    table: Int[Array, "n _"],
    slots: Int[Array, " n"],
) -> tuple[State, Report]:
    """`steps` steps of the first `count` of these slots (see `some_slots.places`) that are live and
    not done; these are the slots' tables, and all others do not change.

    The report has, for each that steps: the new tokens (W · steps places), the bits of their
    logprobs, the number that each step committed, the number of steps, whether the slot is done,
    and the slot. Models that draw nothing change no logits and give no logprobs.
    """
    everyone, width = state.sequences, models.block_size
    kept = {} if models.sampled else {name: getattr(everyone, name) for name in DRAWN}
    everyone = everyone._replace(**dict.fromkeys(kept))
    (who, live), batch = slots_of(slots), len(everyone.length)
    if count < len(slots):
        chosen = first_of(live & ~everyone.done[who], count)
        who, live, table = who[chosen], live[chosen], table[chosen]
    all_step = count == batch
    s = everyone if all_step else taken(everyone, who)
    # The loop's graphs read a number of the program's own: the argument's address is another one in
    # each call, and would be written into every layer's node again.
    table = jnp.maximum(table, 0)
    state = state._replace(sequences=s._replace(done=s.done | ~live))
    state = with_table(state, table, None if all_step else who)
    state = lax.fori_loop(0, steps, lambda _, x: speculative_step(models, params, x), state)
    report = report_of(s, state, who, width, steps)
    after = state.sequences._replace(done=jnp.where(live, state.sequences.done, s.done))
    after = after if all_step else jax.tree.map(putting(who, batch), everyone, after)
    return with_table(state._replace(sequences=after._replace(**kept)), None), report


def for_host(models: Models, function: Any) -> Any:
    """The function, of whose second result the host reads the first array always: on one GPU it
    comes into the host's memory with the program's end, where a copy that the host asks for comes
    0.2 ms after it."""
    one_gpu = models.kernels.attention == "canonical" and models.mesh is None
    return functools.partial(_into_host, function) if one_gpu else function


def _into_host(function: Any, *given: Any) -> tuple[Any, Any]:
    kept, result = function(*given)
    first = result._fields[0]
    return kept, result._replace(**{first: jax.device_put(result[0], jax.memory.Space.Host)})


def of_all_kinds(models: Models, slots: int) -> Models:
    """The models that serve requests of every kind. A changed logit depends on the drafts before
    it, so their steps verify whole blocks. Drafts are drawn as if none were ranked, unless the
    number of rows is a fixed one."""
    fixed = None if models.rows in (None, AUTO) else slots * models.block_size
    return replace(models, sampled=True, rows=fixed)


def compile_programs(models: Models, params: Params, layout: Layout) -> Programs:
    """All executables of a layout; a second call returns the same ones without compiling.

    They know no copies of states: layouts that differ in their number alone share the programs.
    """
    layout = settled(models, layout)
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.typeof(x), params))
    return _compile(models, tuple(leaves), tree, layout._replace(states=0))


def forget() -> None:
    """The next `compile_programs` compiles again, or reads what the cache on disk has."""
    _compile.cache_clear()
    jax.clear_caches()


# Tracing is Python, one program after the other: a program compiles while the next is traced.
@functools.lru_cache(maxsize=64)
def _compile(models: Models, leaves: tuple, tree: Any, layout: Layout) -> Programs:
    params, shape = jax.tree.unflatten(tree, leaves), layout.shape
    state = jax.eval_shape(lambda: empty_state(models, layout))
    weights, where = param_specs(models, params), state_specs(models, layout)
    gives = (where, EVERYWHERE)
    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    columns = table_columns(models, layout)
    draws, width = of_all_kinds(models, layout.slots), models.target.config.hidden_size
    of_kind = {"drawn": draws, "greedy": replace(models, sampled=False, rows=None)}
    hidden = lambda rows: jax.ShapeDtypeStruct((1, rows, width), models.dtype)  # noqa: E731

    def made(function: Any, takes: Any, gives: Any, donate: tuple[int, ...], *given: Any):
        takes = (*takes, *[EVERYWHERE] * (len(given) - len(takes)))
        where = (models.mesh, takes, gives, donate)
        return compiling(pool.submit, _lower, function, given, *where)

    def steps(models: Models, slots: int):
        bound = for_host(models, functools.partial(run, local(models), layout.steps, slots))
        n = given_slots(layout, slots)
        given = params, state, ints(n, columns), ints(n)
        return made(bound, (weights, where), gives, (1,), *given)

    def over(function: Any, models: Models, prompts: int, size: int, read: bool = False):
        bound = functools.partial(function, shape, local(models), size)
        bound = for_host(models, bound) if read else bound
        given = ints(prompts, CONTROL + columns + row_size(shape))
        return made(bound, (weights, where), gives, (1,), params, state, given)

    def chunk(size: int):
        return over(prefill.chunk, draws, 1, size)

    def whole(sizes: tuple[int, int]):
        return over(prefill.whole, of_kind["greedy"], *sizes, read=True)

    def first(kind: Kind):
        bound = for_host(models, functools.partial(prefill.first, local(of_kind[kind])))
        given = (params, state.sequences, hidden(1), ints(2), ints(mask_words(models)))
        return made(bound, (weights,), EVERYWHERE, (1,), *given)

    def score(size: int):
        bound = functools.partial(prefill.score, local(draws))
        return made(bound, (weights,), EVERYWHERE, (), params, hidden(size), ints(size))

    counts = slot_counts(models, layout) if "drawn" in layout.kinds else ()
    budgets = steppings(models, layout) if "greedy" in layout.kinds else []
    sizes = pass_sizes(models, shape)
    several = [(1, size) for size in sizes] if "greedy" in layout.kinds else []
    if several:
        several += [each[:2] for each in several_prompts(models, layout)]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        greedy = [
            steps(replace(of_kind["greedy"], rows=models.rows and each.rows), each.slots)
            for each in budgets
        ]
        drawn = [steps(of_all_kinds(models, count), count) for count in counts]
        chunks = [chunk(size) for size in sizes]
        firsts, scores = [first(kind) for kind in KINDS], [score(size) for size in sizes]
        wholes = [whole(each) for each in several]

    def by(keys: Iterable[Any], programs: Iterable[Future]) -> dict[Any, Any]:
        return dict(zip(keys, [program.result() for program in programs], strict=True))

    return Programs(
        chunk=by(sizes, chunks),
        whole=by(several, wholes),
        first=by(KINDS, firsts),
        score=by(sizes, scores),
        greedy=by(budgets, greedy),
        drawn=by(counts, drawn),
    )


def _lower(
    function: Any, given: tuple, mesh: Any, takes: Any, gives: Any, donate: tuple[int, ...]
) -> jax.stages.Lowered:
    return spread(mesh, function, takes, gives, donate).lower(*given)


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
