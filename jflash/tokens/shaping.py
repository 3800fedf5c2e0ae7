"""A request's changes to the target's logits before a token is chosen.

Their order, in float32, is: bias; the repetition, frequency and presence penalties; the minimum
length, before which no stop token can be chosen; the grammar. Temperature and filters come after
them. The changes to a row depend on the tokens before it, the block's drafts included, so drafts
are verified against plain decoding's logits. This file knows no model.

Axes: B batch, W rows of a block, D = W - 1 drafts, S capacity, E entries, V vocabulary, M words of
32 bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.fixed_order import rounded


class Shaping(NamedTuple):
    """Run-time values of each sequence; those of `unshaped` change nothing."""

    ids: Int[Array, "*B E"]  # tokens with a bias, filled up with -1
    bias: Float[Array, "*B E"]
    repetition: Float[Array, "*B"]  # of tokens of prompt and answer
    frequency: Float[Array, "*B"]  # of tokens of the answer, by their count
    presence: Float[Array, "*B"]
    prompt: Int[Array, "*B"]  # tokens of the prompt
    shortest: Int[Array, "*B"]  # the length from which on a stop token may come


def unshaped(batch: int, entries: int) -> Shaping:
    """Values that change nothing."""
    zeros = jnp.zeros(batch)
    return Shaping(
        jnp.full((batch, entries), -1, jnp.int32),
        jnp.zeros((batch, entries)),
        jnp.ones(batch),
        zeros,
        zeros,
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, jnp.int32),
    )


def shaped(
    logits: Float[Array, "B W V"],
    shaping: Shaping,
    tokens: Int[Array, "B S"],
    length: Int[Array, " B"],
    drafts: Int[Array, "B D"],
    stops: Int[Array, "B _"],
) -> Float[Array, "B W V"]:
    """The logits of the tokens after the first `length`, and after each draft that follows them.

    It costs nothing if no sequence of the batch has a change.
    """
    s = shaping
    wanted = jnp.any(s.ids >= 0, axis=-1) | (s.repetition != 1) | (s.frequency != 0)
    wanted |= (s.presence != 0) | (length < s.shortest)
    return lax.cond(
        jnp.any(wanted),
        lambda: _shaped(logits, s, tokens, length, drafts, stops),
        lambda: logits,
    )


def _shaped(logits, s: Shaping, tokens, length, drafts, stops):
    V = logits.shape[-1]
    each = lambda x: x[:, None, None]  # noqa: E731
    bias = _scattered(s.ids, s.bias, V)
    logits = jnp.where(bias[:, None] != 0, logits + bias[:, None], logits)
    place = jnp.arange(tokens.shape[1])
    committed = place < length[:, None]
    answer = _scattered(tokens, (committed & (place >= s.prompt[:, None])).astype(jnp.int32), V)
    seen = _scattered(tokens, committed.astype(jnp.int32), V)
    ahead = jnp.cumsum(jax.nn.one_hot(drafts, V, dtype=jnp.int32), axis=1)
    ahead = jnp.pad(ahead, ((0, 0), (1, 0), (0, 0)))
    count, repeated = answer[:, None] + ahead, (seen[:, None] + ahead) > 0
    factor = each(s.repetition)
    penalised = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = rounded(jnp.where(repeated & (factor != 1), penalised, logits))
    logits = rounded(logits - rounded(count.astype(jnp.float32) * each(s.frequency)))
    logits = jnp.where(count > 0, logits - each(s.presence), logits)
    is_stop = _scattered(stops, jnp.ones(stops.shape, jnp.int32), V) > 0
    early = (length[:, None] + jnp.arange(logits.shape[1])) < s.shortest[:, None]
    return jnp.where(early[..., None] & is_stop[:, None], -jnp.inf, logits)


def constrained(
    logits: Float[Array, "B W V"], raw: Float[Array, "B W V"], allowed: Int[Array, "B W M"]
) -> Float[Array, "B W V"]:
    """The logits of the tokens whose bits are set, and -inf.

    The grammar has the last word: if the other changes leave none of its tokens, as a minimum
    length does where a text must end, the raw logits of its tokens decide.
    """
    bits = (allowed[..., None] >> jnp.arange(32)) & 1
    free = bits.reshape(*allowed.shape[:2], -1)[..., : logits.shape[-1]] != 0
    kept = jnp.where(free, logits, -jnp.inf)
    none = jnp.all(kept == -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(none & free, raw, kept)


def _scattered(
    ids: Int[Array, "B E"], values: Int[Array, "B E"] | Float[Array, "B E"], size: int
) -> Array:
    """[B, V] sums of the values by id; ids below 0 name nothing."""
    sequence = jnp.arange(ids.shape[0])[:, None]
    zeros = jnp.zeros((ids.shape[0], size), values.dtype)
    return zeros.at[sequence, jnp.where(ids < 0, size, ids)].add(values, mode="drop")
