"""The engine's executables: those of a prompt, and calls of a number of steps.

Keys and values lie in pools of pages, and every call brings the page table. Nothing here knows a
queue.
"""

import functools
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jflash.compiled.stored import compiling
from jflash.devices.mesh import EVERYWHERE, local, param_specs, spread
from jflash.pair import Models, Params
from jflash.serving.calls import prefill
from jflash.serving.calls.layout import KINDS, Kind, Layout, settled
from jflash.serving.calls.packing import CONTROL, mask_words, row_size
from jflash.serving.calls.pass_sizes import pass_sizes, several_prompts
from jflash.serving.calls.slots import empty_state, state_specs, table_columns
from jflash.serving.calls.some_slots import Stepping, given_slots, slot_counts, steppings
from jflash.serving.calls.steps import for_host, of_all_kinds, run


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
