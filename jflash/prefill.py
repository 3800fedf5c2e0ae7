"""Admitting a prompt: its tokens, then its keys, values and context in chunks of a few shapes.

Every prompt runs the same program, with the last chunk padded, whatever its neighbours are. So its
cache has the same bits in every batch, and no prompt length compiles again. Several sizes of a
chunk are for kernels whose bits do not depend on it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash.layers.passes import Chunk
from jflash.pair import Models, Params
from jflash.speculative import apply
from jflash.state import Sequences, State
from jflash.tokens.sampling import choose, cut_at_stop, greedy


def admit(state: State, slot: Int[Array, ""], request: Sequences) -> State:
    """The state with `request`, one sequence's row, in `slot`, whose old content is gone."""
    target_cache = tuple(layer.cleared(slot) for layer in state.target_cache)
    drafter_cache = tuple(layer.cleared(slot) for layer in state.drafter_cache)
    return State(put(state.sequences, slot, request), target_cache, drafter_cache, state.survey)


def put(sequences: Sequences, slot: Int[Array, ""], row: Sequences) -> Sequences:
    return jax.tree.map(lambda all, one: all.at[slot].set(one), sequences, row)


def prefill(
    models: Models,
    sizes: Sequence[int],
    params: Params,
    state: State,
    slot: Int[Array, ""],
    request: Sequences,
) -> State:
    """Runs the prompt of `request` into `slot` and commits the token that follows it.

    `sizes` of a chunk ascend. The capacity must hold the prompt rounded up to the smallest.
    """
    state = admit(state, slot, request)
    kernels = models.kernels.chunk
    prompt_length = request.length

    def one_chunk(chunk, _, carry):
        target_cache, drafter_cache, _, offset = carry
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
        last = jnp.clip(prompt_length - 1 - offset, 0, chunk - 1)
        newest = lax.dynamic_slice_in_dim(hidden, last, 1, 1)
        return target_cache, drafter_cache, newest, offset + chunk

    newest = jnp.zeros((1, 1, models.target.config.hidden_size), models.dtype)
    carry = (state.target_cache, state.drafter_cache, newest, jnp.int32(0))
    for chunk in reversed(sizes):
        chunks = (prompt_length - carry[3] + chunk - 1) // chunk
        if chunk != sizes[0]:  # a larger one pays if more than half of it is the prompt's
            chunks = (prompt_length - carry[3] + chunk // 2 - 1) // chunk
            chunks = jnp.minimum(chunks, (request.tokens.shape[0] - carry[3]) // chunk)
        carry = lax.fori_loop(0, chunks, functools.partial(one_chunk, chunk), carry)
    target_cache, drafter_cache, newest, _ = carry

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
