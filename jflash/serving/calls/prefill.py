"""A prompt's way into a slot of the engine: its chunks and its first token.

To dispatch a program takes the host a millisecond, however little it computes. So a pass brings
all that the slot begins with, and the last pass over greedy texts' prompts chooses their first
tokens too. Each part is a program without a branch around its large operations: on a GPU the host
would wait for the device to take a branch, and could not dispatch the next program meanwhile.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jflash.compiled.shape import Shape, empty_sequences
from jflash.layers.newest import Newest
from jflash.layers.passes import Chunk, Chunks
from jflash.pair import Models, Params
from jflash.prefill import put
from jflash.records.specs import AttentionSpec
from jflash.serving.calls.packing import CONTROL, FRESH, HEAD, STEPS, row_size
from jflash.serving.calls.slots import CACHES, most_of, with_table
from jflash.serving.calls.some_slots import putting
from jflash.serving.request import BIASED
from jflash.speculative import apply
from jflash.state import Sequences, State
from jflash.tokens.logprobs import bits, judged, noted, read, scored
from jflash.tokens.sampling import Filters, choose, cut_at_stop, greedy
from jflash.tokens.shaping import Shaping, constrained, shaped

SCORED = 16  # rows of a chunk whose logits are in memory at once, for the prompt's logprobs


class Computed(NamedTuple):
    """A chunk's hidden rows, and in the last chunk the one of the prompt's newest token."""

    hidden: Float[Array, "1 C D"]
    newest: Float[Array, "1 1 D"]


class First(NamedTuple):
    """First tokens: [token, done, bits of its logprob], and the bits of the most probable ones.

    Programs that draw nothing give no logprobs.
    """

    token: Int[Array, "P 3"]
    top: Int[Array, "P _"] | None


class Over(NamedTuple):
    """Passes over prompts: tokens offset … end - 1 of each slot's text, the pages, and its row.

    With `steps` the slot steps after this pass, from its newest token, which it had before; without
    it idles. `fresh`: its states begin empty.
    """

    slot: Int[Array, " P"]
    offset: Int[Array, " P"]
    end: Int[Array, " P"]
    steps: Bool[Array, " P"]
    fresh: Bool[Array, " P"]
    table: Int[Array, "P _"]
    rows: Sequences
    asked: tuple[Int[Array, " P"], Bool[Array, " P"]]  # logprobs: how many, and processed ones


def unpacked(shape: Shape, given: Int[Array, "P _"]) -> Over:
    """The passes that the host has packed."""
    control, table, rows = jnp.split(given, (CONTROL, given.shape[1] - row_size(shape)), axis=1)
    slot, offset, end, flags = control.T
    asked = rows[:, 15], rows[:, 16] % 2 > 0
    rows = jax.vmap(functools.partial(_sequence, shape))(rows)
    return Over(slot, offset, end, flags & STEPS > 0, flags & FRESH > 0, table, rows, asked)


def _sequence(shape: Shape, row: Int[Array, " _"]) -> Sequences:
    """One request as its slot begins, without logprobs."""
    _, _, limit, accept, top_k = row[:5]
    seed, index = lax.bitcast_convert_type(row[5:7], jnp.uint32)
    floats = lax.bitcast_convert_type(row[7:13], jnp.float32)
    temperature, top_p, min_p, repetition, frequency, presence = floats
    ids, bias = jnp.split(row[-2 * BIASED :], 2)
    bias = lax.bitcast_convert_type(bias, jnp.float32)
    new = jax.tree.map(lambda x: x[0], empty_sequences(shape._replace(batch=1)))
    return new._replace(
        tokens=row[HEAD + shape.stop_slots : -2 * BIASED],
        limit=limit,
        stops=row[HEAD : HEAD + shape.stop_slots],
        max_accept=accept,
        key=jax.random.fold_in(jax.random.key(seed), index),
        filters=Filters(temperature, top_k, top_p, min_p),
        shaping=Shaping(ids, bias, repetition, frequency, presence, row[13], row[14]),
        best_drafts=row[16] >= 2,
    )


def chunk(
    shape: Shape, models: Models, size: int, params: Params, state: State, given: Int[Array, "1 _"]
) -> tuple[State, Computed]:
    """Computes keys, values and context of at most `size` tokens of one slot's text.

    The slot gets its row with every chunk: nothing but chunks has changed it since.
    """
    over = unpacked(shape, given)
    hidden, state = _computed(models, size, params, state, over)
    # Steps of other slots work on this one too, at its length: a recurrent state keeps what it has.
    length = jnp.minimum(over.offset + size, over.end) + 1
    rows = over.rows._replace(length=length, done=~over.steps)
    state = state._replace(sequences=_entered(state.sequences, over, rows))
    return state, Computed(hidden, _newest(models, size, over).of(hidden))


def whole(
    shape: Shape, models: Models, size: int, params: Params, state: State, given: Int[Array, "P _"]
) -> tuple[State, First]:
    """The last chunks of P greedy texts' prompts and the tokens that follow: the slots step then.

    Passes over nothing (`packing.no_pass`) may be among them.
    """
    over = unpacked(shape, given)
    newest, alone = _newest(models, size, over), reads_newest_alone(models)
    hidden, state = _computed(models, size, params, state, over, newest if alone else None)
    hidden = hidden if alone else newest.of(hidden)
    matmul, rows, end = models.kernels.chunk.matmul, over.rows, over.end
    logits = apply(models.target, params.target, hidden, matmul, method="logits")
    token = greedy(logits)
    done = _ended(rows, token, end)
    tokens = rows.tokens.at[jnp.arange(len(end)), end].set(token[:, 0])
    rows = rows._replace(tokens=tokens, length=end + 1, done=done)
    state = state._replace(sequences=_entered(state.sequences, over, rows))
    numbers = [token[:, 0], done.astype(jnp.int32), jnp.zeros_like(end)]
    return state, First(jnp.stack(numbers, axis=1), None)


def _entered(sequences: Sequences, over: Over, rows: Sequences) -> Sequences:
    """The sequences with P rows in their slots."""
    into, asked = putting(over.slot, len(sequences.length)), sequences.logprobs
    assert asked is not None, "the engine's slots have them"
    count, processed = map(into, (asked.count, asked.processed), over.asked)
    entered = jax.tree.map(into, sequences._replace(logprobs=None), rows)
    return entered._replace(logprobs=asked._replace(count=count, processed=processed))


def reads_newest_alone(models: Models) -> bool:
    """Whether the last layer may make its output for the prompts' newest tokens alone: no bit of a
    row hangs on the others, and no feature of the drafter is that layer's output.
    """
    config = models.target.config
    attends = isinstance(config.layers[-1].mixer, AttentionSpec)
    return models.one_arithmetic and attends and config.num_layers - 1 not in models.taps


def _computed(
    models: Models, size: int, params: Params, state: State, to: Over, last: Newest | None = None
) -> tuple[Float[Array, "P _ D"], State]:
    """The hidden rows that the last layer's pass reads, and the state with the keys, values and
    context of all.
    """
    kernels = models.kernels.chunk
    positions = to.offset[:, None] + jnp.arange(size)
    tokens = jnp.take_along_axis(to.rows.tokens, positions, axis=1, mode="clip")
    # A layer with pages sees only the pools of the other sequences. Where P is 1, a slice of the
    # table's one row from the slot on is that row.
    over = Chunks(to.slot, to.offset, to.end, kernels)
    if len(to.slot) == 1:
        over = Chunk(to.slot[0], to.offset[0], to.end[0], kernels)
    past = len(state.sequences.length)  # a slot that nothing clears
    for fresh, slot in zip(to.fresh, to.slot, strict=True):
        state = cleared(state, jnp.where(fresh, slot, past))
    state = with_table(state, to.table)
    hidden, features, target_cache = apply(
        models.target, params.target, tokens, positions, state.target_cache, over, models.taps, last
    )
    drafter_cache = state.drafter_cache
    if models.drafter is not None:
        context = apply(
            models.drafter, params.drafter, features, positions, kernels, method="context"
        )
        pairs = zip(drafter_cache, context, strict=True)
        drafter_cache = tuple(over.write(projected, cache) for cache, projected in pairs)
    state = state._replace(target_cache=target_cache, drafter_cache=drafter_cache)
    return hidden, with_table(state, None)


def cleared(state: State, slot: Int[Array, ""]) -> State:
    """The state before a new text begins in the slot."""
    caches = {name: tuple(x.cleared(slot) for x in getattr(state, name)) for name in CACHES}
    return state._replace(**caches)


def _newest(models: Models, size: int, over: Over) -> Newest:
    """The rows of the prompts' newest tokens, if the pass has them."""
    rows = jnp.clip(over.end - 1 - over.offset, 0, size - 1)
    return Newest(over.offset, rows, models.kernels.chunk)


def _ended(rows: Sequences, token: Int[Array, "P 1"], end: Int[Array, " P"]) -> Bool[Array, " P"]:
    """Whether texts end with their first token."""
    _, stopped = cut_at_stop(token, jnp.ones_like(end), rows.stops)
    return stopped | (end + 1 >= rows.limit)


def first(
    models: Models,
    params: Params,
    sequences: Sequences,
    newest: Float[Array, "1 1 D"],
    control: Int[Array, "2"],
    allowed: Int[Array, " M"],
) -> tuple[Sequences, First]:
    """Chooses the token after a prompt, of those whose bits `allowed` has; then the slot steps.

    `control` is the slot and the prompt's length. Models that draw nothing take the best token of
    the unchanged logits.
    """
    slot, end = control
    row: Any = jax.tree.map(lambda x: x[slot], sequences)
    matmul = models.kernels.chunk.matmul
    logits = apply(models.target, params.target, newest, matmul, method="logits")
    if models.sampled:
        one = jax.tree.map(lambda x: x[None], row)
        none = jnp.zeros((1, 0), jnp.int32)
        changed = shaped(logits, one.shaping, one.tokens, end[None], none, one.stops)
        changed = constrained(changed, logits, allowed[None, None])
        token = choose(changed, end[None, None], one.key, one.filters)
        of = judged(logits, changed, one.filters, one.logprobs)
        numbers = noted(one.logprobs, of, token, end[None], jnp.ones((1, 1), bool))
        row = row._replace(logprobs=jax.tree.map(lambda x: x[0], numbers))
        [[chosen]], [top] = read(numbers.scores, end[None], 1)
    else:
        token, chosen, top = greedy(logits), jnp.int32(0), None
    [done] = _ended(jax.tree.map(lambda x: x[None], row), token, end[None])
    row = row._replace(tokens=row.tokens.at[end].set(token[0, 0]), done=done)
    given = jnp.stack([token[0, 0], done.astype(jnp.int32), chosen])
    return put(sequences, slot, row), First(given[None], None if top is None else top[None])


def score(
    models: Models, params: Params, hidden: Float[Array, "1 C D"], following: Int[Array, " C"]
) -> tuple[Int[Array, " C"], Int[Array, "C _"]]:
    """The numbers of the tokens that follow a chunk's rows, by the unchanged logits.

    The bits of their logprobs, and ids and bits of the most probable tokens.
    """
    size, most, matmul = len(following), most_of(models), models.kernels.chunk.matmul
    rows = math.gcd(size, SCORED)

    def some(piece: tuple[Array, Array]) -> Any:
        hidden, tokens = piece
        logits = apply(models.target, params.target, hidden[None], matmul, method="logits")
        return jax.tree.map(lambda x: x[0], scored(logits, tokens[None], most, jnp.bool_(True)))

    pieces = (hidden.reshape(-1, rows, hidden.shape[2]), following.reshape(-1, rows))
    scores = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), lax.map(some, pieces))
    return bits(scores.chosen), jnp.concatenate([scores.ids, bits(scores.top)], axis=-1)
