"""Admitting a prompt: its tokens, then its keys, values and context in chunks of one shape.

Every prompt runs the same [1, C] program, with the last chunk padded, whatever its neighbours are.
So its cache has the same bits in every batch, and no prompt length compiles again.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash.passes import Chunk
from jflash.sampling import choose, cut_at_stop, greedy
from jflash.speculative import Models, Params, Sequences, State, apply


def admit(state: State, slot: Int[Array, ""], request: Sequences) -> State:
    """The state with `request`, one sequence's row, in `slot`, whose old content is gone."""
    target_cache = tuple(layer.cleared(slot) for layer in state.target_cache)
    drafter_cache = tuple(layer.cleared(slot) for layer in state.drafter_cache)
    return State(put(state.sequences, slot, request), target_cache, drafter_cache, state.survey)


def put(sequences: Sequences, slot: Int[Array, ""], row: Sequences) -> Sequences:
    return jax.tree.map(lambda all, one: all.at[slot].set(one), sequences, row)


def prefill(
    models: Models,
    chunk: int,
    params: Params,
    state: State,
    slot: Int[Array, ""],
    request: Sequences,
) -> State:
    """Runs the prompt of `request` into `slot` and commits the token that follows it.

    The capacity must hold the prompt rounded up to whole chunks.
    """
    state = admit(state, slot, request)
    kernels = models.kernels.chunk
    prompt_length = request.length
    chunks = (prompt_length + chunk - 1) // chunk
    hidden = jnp.zeros((1, chunk, models.target.config.hidden_size), models.dtype)

    def one_chunk(i, carry):
        target_cache, drafter_cache, _ = carry
        offset = i * chunk
        tokens = lax.dynamic_slice(request.tokens, (offset,), (chunk,))[None]
        positions = (offset + jnp.arange(chunk))[None]
        over = Chunk(slot, offset, prompt_length, kernels)
        hidden, features, target_cache = apply(
            models.target, params.target, tokens, positions, target_cache, over, models.taps
        )
        if models.drafter is not None:
            context = apply(
                models.drafter, params.drafter, features, positions, kernels, method="context"
            )
            drafter_cache = tuple(
                over.write(projected, cache)
                for cache, projected in zip(drafter_cache, context, strict=True)
            )
        return target_cache, drafter_cache, hidden

    carry = (state.target_cache, state.drafter_cache, hidden)
    target_cache, drafter_cache, hidden = lax.fori_loop(0, chunks, one_chunk, carry)

    last = prompt_length - 1 - (chunks - 1) * chunk
    newest = lax.dynamic_slice_in_dim(hidden, last, 1, 1)
    logits = apply(models.target, params.target, newest, kernels.matmul, method="logits")
    if models.sampled:
        index, filters = prompt_length[None, None], jax.tree.map(lambda x: x[None], request.filters)
        first = choose(logits, index, request.key[None], filters)
    else:
        first = greedy(logits)
    _, stopped = cut_at_stop(first, jnp.ones(1, jnp.int32), request.stops[None])
    length = prompt_length + 1
    begun = request._replace(
        tokens=request.tokens.at[prompt_length].set(first[0, 0]),
        length=length,
        done=stopped[0] | (length >= request.limit),
    )
    return State(put(state.sequences, slot, begun), target_cache, drafter_cache, state.survey)
