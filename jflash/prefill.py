"""Admitting a prompt: its tokens, then its keys, values and context in chunks of one shape.

Every prompt runs the same [1, C] program, the last chunk padded, whoever its neighbours are: so
its cache is the same bits alone and in a batch, and no prompt length compiles anew.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from jflash.cache import write_context
from jflash.kernels import XLA
from jflash.layers import PrefillAttend
from jflash.sampling import Filters, choose, greedy, through_first_stop
from jflash.speculative import Models, Params, State, apply


class Request(NamedTuple):
    """One sequence to decode, as arrays of fixed shapes; see State for the fields' meaning."""

    prompt: Int[Array, " S"]
    prompt_length: Int[Array, ""]
    limit: Int[Array, ""]
    stops: Int[Array, " E"]
    max_accept: Int[Array, ""]
    key: Key[Array, ""]
    filters: Filters  # scalars


def admit(state: State, slot: Int[Array, ""], request: Request) -> State:
    """The state with `request` in `slot`, nothing of it computed yet."""
    return state._replace(
        tokens=state.tokens.at[slot].set(request.prompt),
        length=state.length.at[slot].set(request.prompt_length),
        limit=state.limit.at[slot].set(request.limit),
        stops=state.stops.at[slot].set(request.stops),
        done=state.done.at[slot].set(False),
        max_accept=state.max_accept.at[slot].set(request.max_accept),
        keys=state.keys.at[slot].set(request.key),
        filters=jax.tree.map(
            lambda all, own: all.at[slot].set(own), state.filters, request.filters
        ),
        steps=state.steps.at[slot].set(0),
        acceptance_lengths=state.acceptance_lengths.at[slot].set(0),
    )


def prefill(
    models: Models, chunk: int, params: Params, state: State, slot: Int[Array, ""], request: Request
) -> State:
    """Runs the prompt of `request` into `slot` and commits the token that follows it.

    The capacity must hold the prompt rounded up to whole chunks.
    """
    state = admit(state, slot, request)
    chunks = (request.prompt_length + chunk - 1) // chunk
    hidden = jnp.zeros(
        (1, chunk, models.target.config.hidden_size), params.target["embedding"].dtype
    )

    def one_chunk(i, carry):
        target_cache, drafter_cache, _ = carry
        offset = i * chunk
        tokens = lax.dynamic_slice(request.prompt, (offset,), (chunk,))[None]
        positions = (offset + jnp.arange(chunk))[None]
        attend = PrefillAttend(slot, offset)
        hidden, features, target_cache = apply(
            models.target, params.target, tokens, positions, target_cache, attend, models.taps,
            XLA._replace(experts=models.kernels.experts),
        )  # fmt: skip
        if models.drafter is not None:
            context = apply(models.drafter, params.drafter, features, positions, method="context")
            rows = [projected.split()[1:] for projected in context]
            drafter_cache = tuple(
                write_context(cache, k, v, slot, offset, request.prompt_length)
                for cache, (k, v) in zip(drafter_cache, rows, strict=True)
            )
        return target_cache, drafter_cache, hidden

    carry = (state.target_cache, state.drafter_cache, hidden)
    target_cache, drafter_cache, hidden = lax.fori_loop(0, chunks, one_chunk, carry)

    last = request.prompt_length - 1 - (chunks - 1) * chunk
    logits = apply(
        models.target, params.target, lax.dynamic_slice_in_dim(hidden, last, 1, 1), method="logits"
    )
    if models.sampled:
        index, filters = (
            request.prompt_length[None, None],
            jax.tree.map(lambda x: x[None], request.filters),
        )
        first = choose(logits, index, request.key[None], filters)
    else:
        first = greedy(logits)
    _, stopped = through_first_stop(first, jnp.ones(1, jnp.int32), request.stops[None])
    length = request.prompt_length + 1
    return state._replace(
        tokens=state.tokens.at[slot, request.prompt_length].set(first[0, 0]),
        length=state.length.at[slot].set(length),
        done=state.done.at[slot].set(stopped[0] | (length >= request.limit)),
        target_cache=target_cache,
        drafter_cache=drafter_cache,
    )
