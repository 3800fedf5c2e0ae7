"""From a drafter's scores to drafts: of each place by itself, or along a path of candidates.

Runs no model. Axes: B batch, T places, V vocabulary, C candidates of a place, A those of the place
before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jflash.models.dflash import Candidates
from jflash.tokens.sampling import (
    DRAFT,
    Filters,
    confidence,
    draw,
    greedy,
    probabilities,
    temperature_only,
)


class Proposal(NamedTuple):
    """Drafts, what they were drawn from, and how sure the drafter is at each place.

    q is None if the best token is taken, and confidence if no rows are ranked by it.
    """

    tokens: Int[Array, "B T"]
    q: Float[Array, "B T V"] | None = None
    confidence: Float[Array, "B T"] | None = None


class Rule(NamedTuple):
    """How drafts are chosen from scores, and what is wanted of them besides."""

    draws: bool  # from q; if not, the best is taken
    ranked: bool  # with a confidence
    filters: Filters
    indices: Int[Array, "B T"]  # of the drafted tokens
    keys: Key[Array, " B"]


def choose(rule: Rule, scores: Float[Array, "B T C"]) -> Proposal:
    """One of C at each place; q is of these C."""
    q = probabilities(scores, rule.filters) if rule.draws else None
    tokens = greedy(scores) if q is None else draw(q, rule.indices, rule.keys, DRAFT)
    return Proposal(tokens, q, confidence(scores, q, rule.filters) if rule.ranked else None)


def choose_places(rule: Rule, found: Candidates, vocab: int) -> Proposal:
    """Drafts of places whose scores do not depend on other drafts."""
    proposal, ids = choose(rule, found.scores), found.ids
    if ids is None:
        return proposal
    q = proposal.q
    if q is not None:
        everything = jnp.zeros((*q.shape[:2], vocab), q.dtype)
        q = everything.at[:, :, ids].set(q, unique_indices=True)
    return proposal._replace(tokens=ids[proposal.tokens], q=q)


def choose_path(rule: Rule, found: Candidates, vocab: int) -> Proposal:
    """Drafts from left to right; a place's q and confidence depend on the drafts before it.

    q knows the request's temperature and no other filter.
    """
    ids, rule = found.ids, rule._replace(filters=temperature_only(rule.filters))
    assert ids is not None, "a candidate of a place has an id"
    # Each place chooses for every token that may be before it, all places at once.
    every = jax.vmap(lambda scores: choose(rule, scores), in_axes=2, out_axes=2)
    choices, q, sure = every(found.scores)
    path = follow(choices)
    before = jnp.pad(path, ((0, 0), (1, 0)))[:, :-1]  # after the anchor all rows are equal
    if sure is not None:
        sure = _at(sure, before)
    if q is not None:
        own = jnp.take_along_axis(q, before[:, :, None, None], axis=2)[:, :, 0]
        q = _spread(own, ids, vocab)
    return Proposal(_at(ids, path), q, sure)


def follow(choices: Int[Array, "B T A"]) -> Int[Array, "B T"]:
    """The path through the choices: the candidate to take, given the one before."""

    def one(before, choice):
        taken = jnp.take_along_axis(choice, before[:, None], axis=1)[:, 0]
        return taken, taken

    start = jnp.zeros_like(choices[:, 0, 0])
    return jnp.moveaxis(lax.scan(one, start, jnp.moveaxis(choices, 1, 0), unroll=True)[1], 0, 1)


def _at(x: Array, index: Int[Array, "B T"]) -> Array:
    """One entry of the last axis for each place."""
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def _spread(
    q: Float[Array, "B T C"], candidates: Int[Array, "B T C"], vocab: int
) -> Float[Array, "B T V"]:
    """Probabilities of all tokens, 0 for those that are no candidates."""
    B, T, _ = q.shape
    rows, places = jnp.arange(B)[:, None, None], jnp.arange(T)[:, None]
    return (
        jnp.zeros((B, T, vocab), q.dtype).at[rows, places, candidates].set(q, unique_indices=True)
    )
