"""Admitting a prompt: its tokens, then its keys, values and context in chunks of one shape.

Every prompt runs the same [1, C] program, the last chunk padded, whoever its neighbours are: so
its cache is the same bits alone and in a batch, and no prompt length compiles anew.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash.cache import write_context
from jflash.layers import PrefillAttend
from jflash.sampling import choose, greedy, through_first_stop
from jflash.speculative import Models, Params, Sequences, State, apply


def admit(state: State, slot: Int[Array, ""], request: Sequences) -> State:
    """The state with `request`, one sequence's row, in `slot`."""
    put = jax.tree.map(lambda all, one: all.at[slot].set(one), state.sequences, request)
    return state._replace(sequences=put)


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
    kernels = models.kernels.chunk
    prompt_length = request.length
    chunks = (prompt_length + chunk - 1) // chunk
    hidden = jnp.zeros(
        (1, chunk, models.target.config.hidden_size), params.target["embedding"].dtype
    )

    def one_chunk(i, carry):
        target_cache, drafter_cache, _ = carry
        offset = i * chunk
        tokens = lax.dynamic_slice(request.tokens, (offset,), (chunk,))[None]
        positions = (offset + jnp.arange(chunk))[None]
        attend = PrefillAttend(slot, offset, kernels)
        hidden, features, target_cache = apply(
            models.target, params.target, tokens, positions, target_cache, attend, models.taps,
            kernels,
        )  # fmt: skip
        if models.drafter is not None:
            context = apply(
                models.drafter, params.drafter, features, positions, kernels, method="context"
            )
            rows = [projected.split(kernels.heads)[1:] for projected in context]
            drafter_cache = tuple(
                write_context(cache, k, v, slot, offset, prompt_length)
                for cache, (k, v) in zip(drafter_cache, rows, strict=True)
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
    _, stopped = through_first_stop(first, jnp.ones(1, jnp.int32), request.stops[None])
    length = prompt_length + 1
    begun = request._replace(
        tokens=request.tokens.at[prompt_length].set(first[0, 0]),
        length=length,
        done=stopped[0] | (length >= request.limit),
    )
    return admit(State(state.sequences, target_cache, drafter_cache), slot, begun)
