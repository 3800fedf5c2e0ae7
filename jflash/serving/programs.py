"""The engine's executables: admit a row, compute a chunk of a prompt, run a number of steps.

Keys and values lie in pools of pages, and every call brings the page table. The host uploads and
reads one array a call. Nothing here knows a queue.
"""

import functools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jflash.cache import LayerCache, PagedCache, RingCache, WindowCache
from jflash.kernels import AUTO
from jflash.logprobs import Scores, bits, judged, noted, read, scored, unasked
from jflash.mesh import EVERYWHERE, local, param_specs, shared, specs, spread
from jflash.passes import Chunk
from jflash.prefill import put
from jflash.programs import Shape, empty_sequences
from jflash.row_choice import TIMED_CALLS, ChosenRows, kept_times, row_counts
from jflash.rows import Survey, empty_survey
from jflash.sampling import Filters, choose, cut_at_stop
from jflash.serving.request import MOST, Request, Top
from jflash.shaping import Shaping, constrained, shaped, unshaped
from jflash.speculative import Models, Params, Sequences, State, apply, speculative_step
from pallas_kernels.block_attention import PAGE

DRAWN = ("shaping", "logprobs", "best_drafts")  # of Sequences; greedy programs read none
CACHES = ("target_cache", "drafter_cache")  # of a State
BIASED = 320  # tokens with a bias in a request at most; OpenAI's limit is 300
HEAD = 17  # numbers of a row before its stop ids and tokens
SCORED = 16  # rows of a chunk whose logits are in memory at once, for the prompt's logprobs


Kind = Literal["greedy", "drawn"]
KINDS: tuple[Kind, ...] = ("greedy", "drawn")


class Layout(NamedTuple):
    """The static sizes; `shape.capacity` is PAGE times the columns of a table."""

    shape: Shape
    pages: int
    steps: int  # of a call
    kinds: tuple[Kind, ...] = KINDS  # of requests that it serves

    @property
    def columns(self) -> int:
        return self.shape.capacity // PAGE


class Programs(NamedTuple):
    """Executables of one layout. `state` is donated, and its paged layers have no table.

    admit(state, row) -> state
    chunk(params, state, table, control, allowed) -> (state, Chunked)
    greedy[rows], drawn (params, state, table, live) -> (state, report)

    `greedy` has a program for each number of rows that a step may verify; `drawn` verifies all, and
    serves requests of every kind. Only the layout's kinds are there.
    """

    admit: Any
    chunk: Any
    greedy: dict[int, Any]
    drawn: Any | None


class Report(NamedTuple):
    """The host's view of a call; see `taken`. The survey covers all calls so far.

    `tops` has the ids and the bits of the most probable tokens, where a program knows them.
    """

    numbers: Int[Array, "B _"]
    tops: Int[Array, "B _ _"] | None
    survey: Survey | None


class Chunked(NamedTuple):
    """The host's view of a chunk: a first token with its numbers, and those of the prompt's.

    `first` is [token, done, bits of its logprob]; row i of `chosen` and `tops` is of the token
    after the chunk's row i.
    """

    first: Int[Array, "3"]
    first_top: Int[Array, "1 _"]
    chosen: Int[Array, " C"]
    tops: Int[Array, "C _"]


class Row(NamedTuple):
    """A slot's new content: a request and the tokens of its text so far."""

    slot: int
    request: Request
    seed: int
    tokens: list[int]


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty_state(models: Models, layout: Layout) -> State:
    """A state with empty slots and pages of zeros, on all devices that share the models."""
    make = functools.partial(_empty_state, local(models), layout)
    return shared(models.mesh, make, (), state_specs(models, layout))()


def state_specs(models: Models, layout: Layout) -> Any:
    """Where a state's arrays lie: devices share the pools, and all have the sequences."""
    return specs(models, functools.partial(_empty_state, layout=layout))


def _empty_state(models: Models, layout: Layout) -> State:
    shape = layout.shape

    def paged(layer):
        if not isinstance(layer, LayerCache | RingCache):
            return layer
        kind = PagedCache
        count = layout.pages
        if isinstance(layer, RingCache):
            assert window is not None, "a ring is of a window"
            kind, count = WindowCache, window.pages
        k, v = (jnp.zeros((count, PAGE, *x.shape[2:]), x.dtype) for x in (layer.k, layer.v))
        return kind(k, v, None)

    window = sliding(models, layout)
    sizes = (shape.batch, PAGE, max(models.block_size, shape.chunk), models.dtype)
    both = (models.target, models.drafter)
    target, drafter = (
        () if model is None else tuple(map(paged, model.empty_states(*sizes))) for model in both
    )
    survey = None if models.rows is None else empty_survey()
    sequences = empty_sequences(shape)._replace(
        shaping=unshaped(shape.batch, BIASED),
        logprobs=unasked(shape.batch, places_of(models, layout), most_of(models)),
        best_drafts=jnp.zeros(shape.batch, bool),
    )
    return State(sequences, target, drafter, survey)


def places_of(models: Models, layout: Layout) -> int:
    """The tokens that a slot may get in a call."""
    return models.block_size * layout.steps


def most_of(models: Models) -> int:
    """The most probable tokens that a request may ask for."""
    return min(MOST, models.target.config.vocab_size)


class Window(NamedTuple):
    """The pools of the layers with windows: the largest window, and their pages in all."""

    size: int
    pages: int


def sliding(models: Models, layout: Layout) -> Window | None:
    """Room for what the slots see of the past, compute and may commit ahead, and as much again for
    prefixes; None without windows. The slots' need is always met."""
    windows = [m.window for c in models.configs for m in c.mixers if m.window is not None]
    if not windows:
        return None
    shape, ahead = layout.shape, 3 * layout.steps * models.block_size
    one = -(-(max(windows) + max(shape.chunk, ahead)) // PAGE) + 2
    return Window(max(windows), shape.batch * min(2 * one, layout.columns))


def table_columns(models: Models, layout: Layout) -> int:
    """The columns of a call's table; the second half is of the layers with windows."""
    return layout.columns * (1 if sliding(models, layout) is None else 2)


def with_table(state: State, table: Int[Array, "B _"] | None) -> State:
    """The state with its table of pages in every layer that has pages."""
    layers = (*state.target_cache, *state.drafter_cache)
    full = window = table
    if table is not None and any(isinstance(layer, WindowCache) for layer in layers):
        full, window = jnp.split(table, 2, axis=1)

    def one(layer):
        if isinstance(layer, WindowCache):
            return layer._replace(table=window)
        return layer._replace(table=full) if isinstance(layer, PagedCache) else layer

    caches = {name: tuple(map(one, getattr(state, name))) for name in CACHES}
    return state._replace(**caches)


def packed(row: Row, layout: Layout, max_accept: int) -> Int[np.ndarray, " _"]:
    """A row as one array of numbers, which `admit` takes apart."""
    request, sampling = row.request, row.request.sampling
    limit = len(request.prompt_ids) + request.max_tokens
    accept = max_accept if request.speculate else 0
    out = np.zeros(row_size(layout.shape), np.int32)
    out[:5] = row.slot, len(row.tokens), limit, accept, min(sampling.top_k, 2**31 - 1)
    out[5:7] = np.array([row.seed, request.index], np.uint32).view(np.int32)
    floats = [sampling.temperature, sampling.top_p, sampling.min_p]
    floats += [request.repetition_penalty, request.frequency_penalty, request.presence_penalty]
    out[7:13] = np.array(floats, np.float32).view(np.int32)
    out[13:15] = len(request.prompt_ids), len(request.prompt_ids) + request.min_tokens
    out[15] = max(request.top_logprobs, request.prompt_logprobs or 0)
    out[16] = (request.logprobs_mode == "processed") + 2 * request.best_drafts
    stops = out[HEAD : HEAD + layout.shape.stop_slots]
    stops[:] = -1
    stops[: len(request.stop_ids)] = request.stop_ids
    first = HEAD + layout.shape.stop_slots
    out[first : first + len(row.tokens)] = row.tokens
    ids, bias = np.full(BIASED, -1, np.int32), np.zeros(BIASED, np.float32)
    ids[: len(request.logit_bias)] = list(request.logit_bias)
    bias[: len(request.logit_bias)] = list(request.logit_bias.values())
    out[-2 * BIASED :] = np.concatenate([ids, bias.view(np.int32)])
    return out


def row_size(shape: Shape) -> int:
    """Numbers of a packed row."""
    return HEAD + shape.stop_slots + shape.capacity + 2 * BIASED


def mask_words(models: Models) -> int:
    """32-bit words of a mask over the target's vocabulary."""
    return -(-models.target.config.vocab_size // 32)


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


def report_of(before: Sequences, state: State, width: int, steps: int) -> Report:
    """What `steps` steps of blocks of `width` rows added; see `run`."""
    s = state.sequences

    def cut(x: Array, first: Array, count: int) -> Array:
        index = first[:, None] + jnp.arange(count)
        return jnp.take_along_axis(x, jnp.minimum(index, x.shape[1] - 1), axis=1)

    ends = jnp.stack([s.steps - before.steps, s.done.astype(jnp.int32)], axis=1)
    numbers, tops = [cut(s.tokens, before.length, width * steps)], None
    if s.logprobs is not None:
        chosen, tops = read(s.logprobs.scores, before.length, width * steps)
        numbers.append(chosen)
    else:
        numbers.append(jnp.zeros_like(numbers[0]))
    numbers += [cut(s.acceptance_lengths, before.steps, steps), ends]
    return Report(jnp.concatenate(numbers, axis=1), tops, state.survey)


class Taken(NamedTuple):
    """A slot's part of a report: the tokens of each step, and whether the text has ended."""

    steps: list[list[int]]
    logprobs: list[list[float]]
    done: bool
    tops: list[list[Top]] | None = None


def taken(
    report: Int[np.ndarray, " _"], tops: Int[np.ndarray, "_ _"] | None, width: int, steps: int
) -> Taken:
    """One slot's row of a `run`'s report, with its most probable tokens if they were read."""
    count, done = report[-2:]
    tokens, probable = report[: width * steps], floats(report[width * steps : 2 * width * steps])
    ends = np.cumsum(report[2 * width * steps :][:count]).tolist()
    cuts = list(zip([0, *ends], ends, strict=False))
    given, numbers = ([x[a:b].tolist() for a, b in cuts] for x in (tokens, probable))
    likely = None if tops is None else [tops_of(tops[a:b]) for a, b in cuts]
    return Taken(given, numbers, bool(done), likely)


def floats(bits: Int[np.ndarray, "*lead"]) -> Float[np.ndarray, "*lead"]:
    """The numbers whose bits these are."""
    return np.ascontiguousarray(bits).view(np.float32)


def tops_of(rows: Int[np.ndarray, "_ _"]) -> list[Top]:
    """The most probable tokens of each place."""
    ids, top = np.split(rows, 2, axis=1)
    pairs = zip(ids.tolist(), floats(top).tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]


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
        function = functools.partial(run, local(models), layout.steps)
        jitted = spread(models.mesh, function, takes, gives, donate=(1,))
        return jitted.lower(params, state, ints(shape.batch, columns), live).compile()

    counts = [models.rows or shape.batch * models.block_size]
    if models.rows == AUTO:
        counts = row_counts(shape.batch, models.block_size)
    greedy = {
        int(count): steps(replace(models, sampled=False, rows=models.rows and int(count)))
        for count in counts
        if "greedy" in layout.kinds
    }
    row, words = ints(row_size(shape)), ints(mask_words(models))
    one_chunk = functools.partial(chunk, local(draws), shape.chunk)
    one_chunk = spread(models.mesh, one_chunk, (*takes, EVERYWHERE), gives, donate=(1,))
    admitting = functools.partial(admit, shape)
    admitting = spread(models.mesh, admitting, (where, EVERYWHERE), where, donate=(0,))
    return Programs(
        admitting.lower(state, row).compile(),
        one_chunk.lower(params, state, ints(1, columns), ints(6), words).compile(),
        greedy,
        steps(draws) if "drawn" in layout.kinds else None,
    )


def choosing(models: Models, params: Params, layout: Layout, programs: Programs) -> ChosenRows:
    """Picks among the greedy programs, by their times here and the survey of the drafts."""
    measure = functools.partial(_times, models, params, layout, programs.greedy)
    folder = jax.config.jax_compilation_cache_dir
    where = Path(folder) if folder else None
    ms = kept_times(models, layout, measure, where)
    return ChosenRows(None, programs.greedy, ms, 0.0)


def _times(models: Models, params: Params, layout: Layout, greedy: dict[int, Any]):
    """Milliseconds of a step by its rows; all slots are live, halfway through their pages."""
    batch, half = layout.shape.batch, layout.shape.capacity // 2
    columns, window = table_columns(models, layout), sliding(models, layout)
    fewest = min(layout.pages, window.pages if window else layout.pages)
    pages = np.arange(batch * columns, dtype=np.int32) % fewest
    table, live = pages.reshape(batch, columns), np.ones(batch, bool)
    state = empty_state(models, layout)
    ms = {}
    for rows, program in greedy.items():
        seconds = []
        for _ in range(TIMED_CALLS):
            state = state.with_sequences(
                length=jnp.full(batch, half, jnp.int32),
                limit=jnp.full(batch, layout.shape.capacity, jnp.int32),
                done=jnp.zeros(batch, bool),
            )
            jax.block_until_ready(state)
            begin = time.perf_counter()
            state, report = program(params, state, table, live)
            jax.block_until_ready(report.numbers)
            seconds.append(time.perf_counter() - begin)
        ms[rows] = 1000 * min(seconds) / layout.steps
    return ms
