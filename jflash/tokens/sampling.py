"""From logits to tokens, and the number of drafts that they confirm. Keys are explicit; no state.

Lossless: every committed token has the distribution p that the target gives it after the tokens
before it, under its request's temperature and filters. Two rules for drafts hold to it:

- one-hot: the draft is the drafter's best token. The target draws a token from p at every row. A
  draft is accepted if it is that token, so with probability p(d); if not, the drawn token has the
  distribution of the residual, p without d. A seed gives the tokens that plain decoding draws,
  whatever was drafted.
- from q: the draft d is drawn from the drafter's q, under the same temperature and filters, and
  accepted if u · q(d) < p(d) for a uniform u. If not, a token is drawn from the renormalised
  max(p - q, 0). After the last accepted draft the bonus token is drawn from p.

Noise is a function of the request's key, the index of the token that it decides, and its purpose
(DRAFT, ACCEPT, TARGET), so no two decisions share any. The indices of a rejected block are drafted
again with the same noise. This is exact. What a step commits at an index depends only on the noise
of that index and of those before it, and a step ends with the first rejection. So, given all
committed tokens, the noise of later indices has decided nothing yet, and is as good as new.
(The drafter sees committed tokens and at most the drafts before the one it draws, and draws each
index by that index's noise; q is the distribution of a draft after those before it.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jflash.records.decoding import GREEDY, Sampling

DRAFT, ACCEPT, TARGET = 0, 1, 2  # what noise is for: a draft, its test, the target's token
DIGIT = 2  # bits of a bound that one pass over the vocabulary settles


class Filters(NamedTuple):
    """`Sampling` on the device: run-time values, of one sequence or one for each."""

    temperature: Float[Array, "*B"]
    top_k: Int[Array, "*B"]
    top_p: Float[Array, "*B"]
    min_p: Float[Array, "*B"]


def filters_of(sampling: Sampling) -> Filters:
    """The scalars of one request."""
    return Filters(
        jnp.float32(sampling.temperature),
        jnp.int32(min(sampling.top_k, 2**31 - 1)),
        jnp.float32(sampling.top_p),
        jnp.float32(sampling.min_p),
    )


def temperature_only(filters: Filters) -> Filters:
    """The same temperatures, without filters."""
    off = filters_of(GREEDY)
    rest = [jnp.full_like(x, value) for x, value in zip(filters[1:], off[1:], strict=True)]
    return Filters(filters.temperature, *rest)


def greedy(logits: Float[Array, "B T V"]) -> Int[Array, "B T"]:
    """The largest logit; ties go to the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def probabilities(logits: Float[Array, "B T V"], filters: Filters) -> Float[Array, "B T V"]:
    """The probability of each token after temperature, top-k, top-p and min-p, renormalised.

    Ties at a boundary are all kept. top-k keeps the tokens no further from the best logit than the
    k-th, top-p the fewest most probable tokens that hold at least that share of top-k's mass, and
    min-p those with at least that share of the best token's probability. At temperature 0 the
    greedy token has 1.
    """
    t = filters.temperature[:, None, None]
    gaps = jnp.abs(jnp.max(logits, axis=-1, keepdims=True) - logits)  # abs: never -0
    best = jnp.arange(logits.shape[-1]) == greedy(logits)[..., None]
    weights = jnp.where(t > 0, jnp.exp(-gaps / jnp.where(t > 0, t, 1)), best.astype(jnp.float32))
    weights = _where_on(filters.top_k > 0, _top_k, weights, gaps, filters.top_k)
    weights = _where_on(filters.top_p < 1, _top_p, weights, gaps, filters.top_p)
    weights = jnp.where(weights >= filters.min_p[:, None, None], weights, 0)  # the best has 1
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _where_on(on: Bool[Array, " B"], keep: Callable, weights, gaps, value):
    """The weights that a filter keeps; it costs nothing if no sequence of the batch uses it."""
    return lax.cond(
        jnp.any(on),
        lambda: jnp.where(keep(gaps, weights, value[:, None]) | ~on[:, None, None], weights, 0),
        lambda: weights,
    )


def _top_k(gaps, weights, k: Int[Array, "B 1"]) -> Bool[Array, "B T V"]:
    return _nearest(gaps, jnp.ones_like(weights), k.astype(jnp.float32))


def _top_p(gaps, weights, p: Float[Array, "B 1"]) -> Bool[Array, "B T V"]:
    return _nearest(gaps, weights, p * jnp.sum(weights, axis=-1))


def _nearest(
    gaps: Float[Array, "B T V"], weights: Float[Array, "B T V"], goal: Float[Array, " B #T"]
) -> Bool[Array, "B T V"]:
    """The tokens of the smallest gaps (all of equal gap, or none) whose weights sum to `goal`.

    All tokens, if the goal is out of reach. A gap is at least 0, so its bits have its order; the
    bound is settled DIGIT bits a pass from the top, which reads the vocabulary 32 / DIGIT times
    where a sort would write it.
    """
    keys = lax.bitcast_convert_type(gaps, jnp.uint32)

    def settle(i: Array, bound: UInt32[Array, "B T"]) -> UInt32[Array, "B T"]:
        shift = jnp.uint32(32 - DIGIT) - jnp.uint32(DIGIT) * i.astype(jnp.uint32)
        trials = [bound + (jnp.uint32(j) << shift) for j in range(1, 1 << DIGIT)]
        inside = [jnp.where(keys < trial[..., None], weights, 0) for trial in trials]
        # One reduction of several operands: the vocabulary is read once for all of them.
        zeros = [jnp.float32(0)] * len(trials)
        short = [total < goal for total in lax.reduce(inside, zeros, _add, (2,))]
        return bound + (sum(short, jnp.uint32(0)) << shift)

    bound = lax.fori_loop(0, 32 // DIGIT, settle, jnp.zeros(gaps.shape[:2], jnp.uint32))
    return keys <= bound[..., None]


def _add(a: list[Array], b: list[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def draw(
    weights: Float[Array, "B T V"],
    indices: Int[Array, "B T"],
    keys: Key[Array, " B"],
    purpose: int,
) -> Int[Array, "B T"]:
    """A token in proportion to its weight, for each index, by its noise for `purpose`.

    This is a race of exponential clocks: the largest weight / noise wins. Noise comes from 32
    random bits, so it is never 0 and is fine when it is small, as when tokens of little weight win.
    """

    def clocks(key: Array, index: Array) -> Array:
        bits = jax.random.bits(_noise_key(key, index, purpose), weights.shape[-1:], jnp.uint32)
        uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
        return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))

    noise = jax.vmap(jax.vmap(clocks, in_axes=(None, 0)))(keys, indices)
    return jnp.argmax(weights / noise, axis=-1).astype(jnp.int32)


def confidence(
    scores: Float[Array, "B T C"], q: Float[Array, "B T C"] | None, filters: Filters
) -> Float[Array, "B T"]:
    """A drafter's confidence at each place: the largest probability there, of q if it draws from q.

    It is never that of the drawn token: a row that is verified only if a certain token was drawn
    commits that token too often (with p = q and only draws of a verified: p(a) + (1 - p(a)) p(a)).
    """
    best = 1 / jnp.sum(jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), axis=-1)
    if q is None:
        return best
    return jnp.where(filters.temperature[:, None] == 0, best, jnp.max(q, axis=-1))


def choose(
    logits: Float[Array, "B T V"],
    indices: Int[Array, "B T"],
    keys: Key[Array, " B"],
    filters: Filters,
) -> Int[Array, "B T"]:
    """The target's tokens for `indices`, by their filters and their noise."""
    return draw(probabilities(logits, filters), indices, keys, TARGET)


def uniforms(indices: Int[Array, "B T"], keys: Key[Array, " B"]) -> Float[Array, "B T"]:
    """Numbers in [0, 1) that decide on acceptance, one for each index."""

    def one(key: Array, index: Array) -> Array:
        return jax.random.uniform(_noise_key(key, index, ACCEPT))

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, indices)


def _noise_key(key: Key[Array, ""], index: Int[Array, ""], purpose: int) -> Key[Array, ""]:
    return jax.random.fold_in(jax.random.fold_in(key, index), purpose)


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The rest of p after a draft from q is rejected, not renormalised."""
    left = jnp.maximum(p - q, 0)
    # p and q that differ only by rounding may leave nothing: then p is as good.
    return jnp.where(jnp.any(left > 0, axis=-1, keepdims=True), left, p)


def verify_drafts(
    drafts: Int[Array, "B D"],
    q: Float[Array, "B D V"],
    p: Float[Array, "B D+1 V"],
    indices: Int[Array, "B D+1"],
    keys: Key[Array, " B"],
    widths: Int[Array, " B"],
) -> tuple[Int[Array, "B D+1"], Int[Array, " B"]]:
    """Tests drafts drawn from q against p: the tokens to commit, and how many are drafts.

    Row i decides the token at indices[:, i]. Tokens past the first that is no draft are void.
    """
    of_draft = lambda x: jnp.take_along_axis(x, drafts[..., None], axis=-1)[..., 0]  # noqa: E731
    likely = uniforms(indices[:, :-1], keys) * of_draft(q) < of_draft(p[:, :-1])
    accepted = _prefix(likely, widths)
    row = accepted[:, None]
    at = lambda x: jnp.take_along_axis(x, row[..., None], axis=1)[:, 0]  # noqa: E731
    own, drafted = at(p), at(jnp.pad(q, ((0, 0), (0, 1), (0, 0))))
    rejected = (accepted < widths - 1)[:, None]
    weights = jnp.where(rejected, residual(own, drafted), own)
    bonus = draw(weights[:, None], jnp.take_along_axis(indices, row, axis=1), keys, TARGET)
    is_draft = jnp.arange(p.shape[1]) < row
    return jnp.where(is_draft, jnp.pad(drafts, ((0, 0), (0, 1))), bonus), accepted


def accepted_drafts(
    drafts: Int[Array, "B D"], choices: Int[Array, "B D+1"], widths: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Length of the longest prefix of drafts that equals the target's choices, within the width."""
    return _prefix(drafts == choices[:, :-1], widths)


def _prefix(agree: Bool[Array, "B D"], widths: Int[Array, " B"]) -> Int[Array, " B"]:
    agree &= jnp.arange(1, agree.shape[1] + 1) < widths[:, None]
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1)


def cut_at_stop(
    tokens: Int[Array, "B T"], count: Int[Array, " B"], stops: Int[Array, "B E"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """`count` cut to end with the first stop token among the first `count`, and whether one is."""
    row = jnp.arange(tokens.shape[1])
    is_stop = jnp.any(tokens[:, :, None] == stops[:, None, :], axis=-1)
    is_stop &= row < count[:, None]
    first = jnp.argmax(is_stop, axis=1)
    stopped = jnp.any(is_stop, axis=1)
    return jnp.where(stopped, first + 1, count), stopped
