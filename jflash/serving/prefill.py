"""A prompt's way into a slot of the engine: admit it, compute its chunks, choose its first token.

Each part is a program without a branch around its large operations: on a GPU the host would wait
for the device to take a branch, and could not dispatch the next program meanwhile.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jflash.logprobs import bits, judged, noted, read, scored
from jflash.pair import Models, Params
from jflash.passes import Chunk
from jflash.prefill import put
from jflash.programs import Shape, empty_sequences
from jflash.sampling import Filters, choose, cut_at_stop, greedy
from jflash.serving.packing import HEAD
from jflash.serving.slots import BIASED, CACHES, most_of, with_table
from jflash.shaping import Shaping, constrained, shaped
from jflash.speculative import apply
from jflash.state import Sequences, State

SCORED = 16  # rows of a chunk whose logits are in memory at once, for the prompt's logprobs


class Computed(NamedTuple):
    """A chunk's hidden rows, and in the last chunk the one of the prompt's newest token."""

    hidden: Float[Array, "1 C D"]
    newest: Float[Array, "1 1 D"]


class First(NamedTuple):
    """A first token: [token, done, bits of its logprob], and the bits of the most probable ones.

    Programs that draw nothing give no logprobs.
    """

    token: Int[Array, "3"]
    top: Int[Array, "1 _"] | None


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
    control: Int[Array, "4"],
) -> tuple[State, Computed]:
    """Computes keys, values and context of the slot's tokens offset … end - 1, at most `size`.

    `control` is slot, offset, end, steps. With `steps` the slot steps after this chunk, from its
    newest token, which it had before; without, it idles.
    """
    slot, offset, end, steps = control
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
    # Steps of other slots work on this one too, at its length: a recurrent state keeps what it has.
    s = s._replace(
        length=s.length.at[slot].set(jnp.minimum(offset + size, end) + 1),
        done=s.done.at[slot].set(steps == 0),
    )
    state = State(s, target_cache, drafter_cache, state.survey)
    newest = lax.dynamic_slice_in_dim(hidden, end - 1 - offset, 1, 1)
    return with_table(state, None), Computed(hidden, newest)


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
    row = jax.tree.map(lambda x: x[slot], sequences)
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
    _, stopped = cut_at_stop(token, jnp.ones(1, jnp.int32), row.stops[None])
    done = stopped[0] | (end + 1 >= row.limit)
    row = row._replace(tokens=row.tokens.at[end].set(token[0, 0]), done=done)
    given = jnp.stack([token[0, 0], done.astype(jnp.int32), chosen])
    return put(sequences, slot, row), First(given, top)


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
