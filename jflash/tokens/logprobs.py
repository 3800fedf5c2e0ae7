"""Log-probabilities of tokens by the target, and of the most probable tokens of their places.

Sums have a fixed order, and the largest are picked by exact comparison with the lowest id on ties,
so the numbers of a place have the bits of its logits' law. This file knows no model.

Axes: B batch, W rows of a block, V vocabulary, R places, K most probable tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jflash.tokens.sampling import Filters, probabilities
from pallas_kernels.fixed_order import rounded, row_sum


class Scores(NamedTuple):
    """The chosen tokens' log-probabilities, and the K most probable tokens with theirs."""

    chosen: Float[Array, "*B R"]
    ids: Int[Array, "*B R K"]
    top: Float[Array, "*B R K"]


class Logprobs(NamedTuple):
    """What each sequence wants, and its newest numbers: token i's are at place i % R."""

    count: Int[Array, "*B"]  # of most probable tokens
    processed: Bool[Array, "*B"]  # of the logits that tokens are drawn from, not of the target's
    scores: Scores


def unasked(batch: int, places: int, most: int) -> Logprobs:
    """Room for the numbers; no sequence wants any."""
    of = (batch, places)
    scores = Scores(jnp.zeros(of), jnp.zeros((*of, most), jnp.int32), jnp.zeros((*of, most)))
    return Logprobs(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), scores)


def judged(
    raw: Float[Array, "B W V"],
    shaped: Float[Array, "B W V"],
    filters: Filters,
    asked: Logprobs,
) -> Float[Array, "B W V"]:
    """The logits that the numbers are of: the target's, or these after changes, temperature and
    filters. At temperature 0 nothing is filtered. It costs nothing if all are the target's."""
    t = filters.temperature[:, None, None]

    def processed() -> Array:
        kept = (probabilities(shaped, filters) > 0) | (t == 0)
        warm = rounded(shaped / jnp.where(t > 0, t, 1))
        return jnp.where(asked.processed[:, None, None], jnp.where(kept, warm, -jnp.inf), raw)

    return lax.cond(jnp.any(asked.processed), processed, lambda: raw)


def scored(
    logits: Float[Array, "B W V"], chosen: Int[Array, "B W"], most: int, wanted: Bool[Array, ""]
) -> Scores:
    """The numbers of each place; zeros for the most probable tokens unless `wanted`."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(row_sum(rounded(jnp.exp(rounded(logits - best)))))
    of = lambda x: rounded(rounded(x - best) - total)  # noqa: E731
    at_chosen = jnp.take_along_axis(logits, chosen[..., None], axis=-1)
    none = jnp.zeros((*chosen.shape, most))
    top, ids = lax.cond(
        wanted, lambda: tuple(lax.top_k(logits, most)), lambda: (none, none.astype(jnp.int32))
    )
    return Scores(of(at_chosen)[..., 0], ids, jnp.where(wanted, of(top), none))


def noted(
    asked: Logprobs,
    logits: Float[Array, "B W V"],
    chosen: Int[Array, "B W"],
    first: Int[Array, " B"],
    keep: Bool[Array, "B W"],
) -> Logprobs:
    """`asked` with the numbers of the tokens `chosen`, which lie from index `first` on."""
    places = asked.scores.chosen.shape[1]
    row = jnp.arange(chosen.shape[1])
    at = jnp.where(keep, (first[:, None] + row) % places, places + row)
    sequence = jnp.arange(len(first))[:, None]
    new = scored(logits, chosen, asked.scores.ids.shape[2], jnp.any(asked.count > 0))
    put = lambda old, x: old.at[sequence, at].set(x, mode="drop", unique_indices=True)  # noqa: E731
    return asked._replace(scores=Scores(*map(put, asked.scores, new)))


def read(
    scores: Scores, first: Int[Array, " B"], count: int
) -> tuple[Int[Array, "B _"], Int[Array, "B _ _"]]:
    """The bits of the numbers of the tokens from index `first` on: chosen, then ids and top."""
    index = (first[:, None] + jnp.arange(count)) % scores.chosen.shape[1]
    chosen = jnp.take_along_axis(scores.chosen, index, axis=1)
    ids, top = (jnp.take_along_axis(x, index[..., None], axis=1) for x in (scores.ids, scores.top))
    return bits(chosen), jnp.concatenate([ids, bits(top)], axis=-1)


def bits(x: Float[Array, "*lead"]) -> Int[Array, "*lead"]:
    """The same bits as whole numbers, so that one array carries both."""
    return lax.bitcast_convert_type(x, jnp.int32)
