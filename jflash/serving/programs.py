"""The engine's executables: admit a row, compute a chunk of a prompt, run a number of steps.

Keys and values lie in pools of pages, and every call brings the page table. The host uploads and
reads one array a call. Nothing here knows a queue.
"""

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jflash.kernels import AUTO
from jflash.logprobs import Scores, bits, judged, noted, read, scored, unasked
from jflash.mesh import EVERYWHERE, local, param_specs, spread
from jflash.passes import Chunk
from jflash.prefill import put
from jflash.programs import Shape, chunk_sizes, empty_sequences
from jflash.row_choice import ChosenRows, kept_times, row_counts, timed
from jflash.sampling import Filters, choose, cut_at_stop
from jflash.serving.packing import HEAD, Report, mask_words, report_of, row_size
from jflash.serving.slots import (
    BIASED,
    CACHES,
    Layout,
    empty_state,
    most_of,
    sliding,
    state_specs,
    table_columns,
    with_table,
)
from jflash.shaping import Shaping, constrained, shaped
from jflash.speculative import Models, Params, Sequences, State, apply, speculative_step
from jflash.tiles import settled

DRAWN = ("shaping", "logprobs", "best_drafts")  # of Sequences; greedy programs read none
SCORED = 16  # rows of a chunk whose logits are in memory at once, for the prompt's logprobs


class Programs(NamedTuple):
    """Executables of one layout. `state` is donated, and its paged layers have no table.

    admit(state, row) -> state
    chunk[size](params, state, table, control, allowed) -> (state, Chunked)
    greedy[rows], drawn (params, state, table, live) -> (state, report)

    `chunk` has a program for each number of tokens that a pass computes, and `greedy` for each
    number of rows that a step may verify. `drawn` verifies all, and serves requests of every kind.
    Only the layout's kinds are there.
    """

    admit: Any
    chunk: dict[int, Any]
    greedy: dict[int, Any]
    drawn: Any | None


class Chunked(NamedTuple):
    """The host's view of a chunk: a first token with its numbers, and those of the prompt's.

    `first` is [token, done, bits of its logprob]; row i of `chosen` and `tops` is of the token
    after the chunk's row i.
    """

    first: Int[Array, "3"]
    first_top: Int[Array, "1 _"]
    chosen: Int[Array, " C"]
    tops: Int[Array, "C _"]


def admit(shape: Shape, state: State, row: Int[Array, " _"]) -> State:
    """Puts the row into its slot, which idles until its last chunk has run."""
    slot, _, limit, accept, top_k = row[:5]
    asked = state.sequences.logprobs
    assert asked is not None, "the engine's slots have them"
    seed, index = lax.bitcast_convert_type(row[5:7], jnp.uint32)
    floats = lax.bitcast_convert_type(row[7:13], jnp.float32)
    temperature, top_p, min_p, repetition, frequency, presence = floats
    ids, bias = jnp.split(row[-2 * BIASED :], 2)
    bias = lax.bitcast_convert_type(bias, jnp.float32)
    new = jax.tree.map(lambda x: x[0], empty_sequences(shape._replace(batch=1)))
    new = new._replace(
        tokens=row[HEAD + shape.stop_slots : -2 * BIASED],
        length=jnp.int32(1),
        limit=limit,
        stops=row[HEAD : HEAD + shape.stop_slots],
        max_accept=accept,
        key=jax.random.fold_in(jax.random.key(seed), index),
        filters=Filters(temperature, top_k, top_p, min_p),
        shaping=Shaping(ids, bias, repetition, frequency, presence, row[13], row[14]),
        logprobs=jax.tree.map(lambda x: x[slot], asked)._replace(
            count=row[15], processed=row[16] % 2 > 0
        ),
        best_drafts=row[16] >= 2,
    )
    caches = {name: tuple(x.cleared(slot) for x in getattr(state, name)) for name in CACHES}
    return state._replace(sequences=put(state.sequences, slot, new), **caches)


def chunk(
    models: Models,
    size: int,
    params: Params,
    state: State,
    table: Int[Array, "1 _"],
    control: Int[Array, "6"],
    allowed: Int[Array, " M"],
) -> tuple[State, Chunked]:
    """Computes keys, values and context of the slot's tokens offset … end - 1, at most `size`.

    `control` is slot, offset, end, last, commits, scores. After the last chunk the slot steps. If
    that chunk commits, it chooses the token after `end`, of those whose bits `allowed` has; else
    the slot continues from its newest token, which it had before. With `scores` the tokens after
    the chunk's are scored.
    """
    slot, offset, end, last, commits, scores = control
    s = state.sequences
    kernels = models.kernels.chunk
    positions = (offset + jnp.arange(size))[None]
    tokens = jnp.take(s.tokens[slot], positions[0], mode="clip")[None]
    # One sequence with its table: a layer with pages sees only the pools of the others. (A slice
    # from `slot` on of the table's one row is that row.)
    over = Chunk(slot, offset, end, kernels)
    state = with_table(state, table)
    hidden, features, target_cache = apply(
        models.target, params.target, tokens, positions, state.target_cache, over, models.taps
    )
    drafter_cache = state.drafter_cache
    if models.drafter is not None:
        context = apply(
            models.drafter, params.drafter, features, positions, kernels, method="context"
        )
        pairs = zip(drafter_cache, context, strict=True)
        drafter_cache = tuple(over.write(projected, cache) for cache, projected in pairs)
    row = jax.tree.map(lambda x: x[slot], s)

    def committed() -> Sequences:
        newest = lax.dynamic_slice_in_dim(hidden, end - 1 - offset, 1, 1)
        logits = apply(models.target, params.target, newest, kernels.matmul, method="logits")
        one = jax.tree.map(lambda x: x[None], row)
        none = jnp.zeros((1, 0), jnp.int32)
        changed = shaped(logits, one.shaping, one.tokens, end[None], none, one.stops)
        changed = constrained(changed, logits, allowed[None, None])
        first = choose(changed, end[None, None], one.key, one.filters)
        of = judged(logits, changed, one.filters, one.logprobs)
        keep = jnp.ones((1, 1), bool)
        numbers = noted(one.logprobs, of, first, end[None], keep)
        _, stopped = cut_at_stop(first, jnp.ones(1, jnp.int32), row.stops[None])
        return row._replace(
            tokens=row.tokens.at[end].set(first[0, 0]),
            logprobs=jax.tree.map(lambda x: x[0], numbers),
            done=stopped[0] | (end + 1 >= row.limit),
        )

    row = lax.cond(commits > 0, committed, lambda: row._replace(done=last == 0))
    # Steps of other slots work on this one too, at its length: a recurrent state keeps what it has.
    row = row._replace(length=jnp.minimum(offset + size, end) + 1)
    state = state._replace(
        sequences=put(s, slot, row), target_cache=target_cache, drafter_cache=drafter_cache
    )
    state = with_table(state, None)
    chosen, first_top = read(jax.tree.map(lambda x: x[None], row.logprobs.scores), end[None], 1)
    first = jnp.stack([row.tokens[end], row.done.astype(jnp.int32), chosen[0, 0]])
    following = jnp.take(s.tokens[slot], positions[0] + 1, mode="clip")
    prompt = score_rows(models, params, hidden[0], following, scores > 0)
    tops = jnp.concatenate([prompt.ids, bits(prompt.top)], axis=-1)
    return state, Chunked(first, first_top[0], bits(prompt.chosen), tops)


def score_rows(
    models: Models,
    params: Params,
    hidden: Float[Array, "C D"],
    following: Int[Array, " C"],
    wanted: Bool[Array, ""],
) -> Scores:
    """The numbers of the tokens that follow each row, by the unchanged logits; else zeros."""
    size, most, kernels = len(hidden), most_of(models), models.kernels.chunk
    rows = math.gcd(size, SCORED)

    def some(piece):
        hidden, tokens = piece
        logits = apply(models.target, params.target, hidden[None], kernels.matmul, method="logits")
        return jax.tree.map(lambda x: x[0], scored(logits, tokens[None], most, jnp.bool_(True)))

    def all_rows() -> Scores:
        pieces = (hidden.reshape(-1, rows, hidden.shape[1]), following.reshape(-1, rows))
        return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), lax.map(some, pieces))

    nothing = jax.tree.map(lambda x: x[0], unasked(1, size, most).scores)
    return lax.cond(wanted, all_rows, lambda: nothing)


def run(
    models: Models,
    steps: int,
    params: Params,
    state: State,
    table: Int[Array, "B _"],
    live: Bool[Array, " B"],
) -> tuple[State, Report]:
    """`steps` steps of the slots that are `live`; the others do not change.

    The report has, for each slot: the new tokens (W · steps places), the bits of their logprobs,
    the number that each step committed, the number of steps, and whether the slot is done. Models
    that draw nothing change no logits and give no logprobs.
    """
    s, width = state.sequences, models.block_size
    kept = {name: getattr(s, name) for name in DRAWN}
    if not models.sampled:
        state = state.with_sequences(**dict.fromkeys(DRAWN))
    state = with_table(state.with_sequences(done=s.done | ~live), table)
    state = lax.fori_loop(0, steps, lambda _, x: speculative_step(models, params, x), state)
    report = report_of(s, state, width, steps)
    state = state.with_sequences(done=jnp.where(live, state.sequences.done, s.done))
    if not models.sampled:
        state = state.with_sequences(**kept)
    return with_table(state, None), report


def of_all_kinds(models: Models, batch: int) -> Models:
    """The models that serve requests of every kind. A changed logit depends on the drafts before
    it, so their steps verify whole blocks."""
    return replace(models, sampled=True, rows=models.rows and batch * models.block_size)


def compile_programs(models: Models, params: Params, layout: Layout) -> Programs:
    """All executables of a layout; a second call returns the same ones without compiling."""
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.typeof(x), params))
    return _compile(models, tuple(leaves), tree, layout)


@functools.lru_cache(maxsize=64)
def _compile(models: Models, leaves: tuple, tree: Any, layout: Layout) -> Programs:
    params, shape = jax.tree.unflatten(tree, leaves), layout.shape
    state = jax.eval_shape(lambda: empty_state(models, layout))
    weights, where = param_specs(models, params), state_specs(models, layout)
    takes, gives = (weights, where, EVERYWHERE, EVERYWHERE), (where, EVERYWHERE)
    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    live, columns = jax.ShapeDtypeStruct((shape.batch,), jnp.bool_), table_columns(models, layout)
    draws = of_all_kinds(models, shape.batch)

    def steps(models: Models):
        def lower():
            function = functools.partial(run, local(models), layout.steps)
            jitted = spread(models.mesh, function, takes, gives, donate=(1,))
            return jitted.lower(params, state, ints(shape.batch, columns), live)

        return settled(lower).compile()

    counts = [models.rows or shape.batch * models.block_size]
    if models.rows == AUTO:
        counts = row_counts(shape.batch, models.block_size)
    row, words = ints(row_size(shape)), ints(mask_words(models))

    def admitting():
        jitted = spread(
            models.mesh, functools.partial(admit, shape), (where, EVERYWHERE), where, donate=(0,)
        )
        return jitted.lower(state, row).compile()

    def chunks(size: int):
        def lower():
            function = functools.partial(chunk, local(draws), size)
            jitted = spread(models.mesh, function, (*takes, EVERYWHERE), gives, donate=(1,))
            return jitted.lower(params, state, ints(1, columns), ints(6), words)

        return settled(lower).compile()

    sizes = chunk_sizes(models, shape)
    budgets = [int(count) for count in counts] if "greedy" in layout.kinds else []
    greedy = [replace(models, sampled=False, rows=models.rows and count) for count in budgets]
    stepping = [*greedy, *([draws] if "drawn" in layout.kinds else [])]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        step_programs, chunk_programs = pool.map(steps, stepping), pool.map(chunks, sizes)
        admitted, stepped = pool.submit(admitting).result(), list(step_programs)
        by_size = dict(zip(sizes, chunk_programs, strict=True))
    by_rows = dict(zip(budgets, stepped, strict=False))
    return Programs(admitted, by_size, by_rows, stepped[-1] if "drawn" in layout.kinds else None)


def choosing(models: Models, params: Params, layout: Layout, programs: Programs) -> ChosenRows:
    """Picks among the greedy programs, by their times here and the survey of the drafts."""
    measure = functools.partial(_times, models, params, layout, programs.greedy)
    folder = jax.config.jax_compilation_cache_dir
    where = Path(folder) if folder else None
    ms = kept_times(models, layout, measure, where)
    return ChosenRows(None, programs.greedy, ms, 0.0, layout.steps)


def _times(models: Models, params: Params, layout: Layout, greedy: dict[int, Any]):
    """Milliseconds of a step by its rows; see jflash.row_choice.timed."""
    batch = layout.shape.batch
    columns, window = table_columns(models, layout), sliding(models, layout)
    fewest = min(layout.pages, window.pages if window else layout.pages)
    pages = np.arange(batch * columns, dtype=np.int32) % fewest
    table, live = pages.reshape(batch, columns), np.ones(batch, bool)
    return timed(
        greedy, layout.shape, layout.steps, empty_state(models, layout),
        lambda program, state: program(params, state, table, live),
    )  # fmt: skip
