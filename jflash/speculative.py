"""The algorithm and nothing else: draft, verify, accept, commit, in one pure function.

Its shapes are fixed: a compiled step serves every length, room, limit and acceptance.

Axes: B batch, W block width, D = W - 1 drafts, V vocabulary; `state.py` has those of a
state.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, Int

from jflash.layers.passes import Block
from jflash.pair import Models, Params
from jflash.rows import Leading, Rows, Whole, by_place, packed, pick_rows, survivals
from jflash.state import Sequences, State
from jflash.tokens.drafts import Proposal, Rule, choose_path, choose_places
from jflash.tokens.logprobs import judged, noted
from jflash.tokens.sampling import (
    TARGET,
    accepted_drafts,
    choose,
    cut_at_stop,
    draw,
    probabilities,
    verify_drafts,
)
from jflash.tokens.shaping import constrained, shaped


class Seen(NamedTuple):
    """The target's pass over the blocks, before a token is chosen; its rows as `rows` lie."""

    hidden: Float[Array, "_ _ D"]
    logits: Float[Array, "_ _ V"]
    features: Float[Array, "_ _ PD"]  # its tapped layers, for the drafter's context
    rows: Rows


class Verdict(NamedTuple):
    """What the target says of a block; of rows that were not verified, anything."""

    logits: Float[Array, "B W V"]  # changed only where a sequence wants logprobs of changed ones
    choices: Int[Array, "B W"]  # the token after each row, to the first that is not the draft
    accepted: Int[Array, " B"]  # how many drafts its choices confirm
    features: Float[Array, "_ _ PD"]  # its tapped layers, for the drafter's context; as `rows` lie
    rows: Rows


def block_positions(models: Models, state: State) -> tuple[Int[Array, "B W"], Int[Array, " B"]]:
    """Positions of the block's rows, the anchor first, and how many of them there is room for."""
    start = state.sequences.length - 1
    width = models.width(len(start))
    widths = jnp.clip(state.sequences.limit - start, 1, width)
    return start[:, None] + jnp.arange(width), widths


def draft(models: Models, params: Params, state: State) -> tuple[Proposal, State]:
    """W - 1 proposals for the block whose anchor is each sequence's newest token."""
    positions, widths = block_positions(models, state)
    anchor = jnp.take_along_axis(state.sequences.tokens, positions[:, :1], axis=1)
    shape = positions[:, 1:].shape
    if models.drafter is None or not shape[1]:  # never accepted: rows only keep the block's shape
        return Proposal(jnp.broadcast_to(anchor, shape), confidence=jnp.zeros(shape)), state
    mask = jnp.full(shape, models.drafter.config.mask_token_id)
    block = jnp.concatenate([anchor, mask.astype(anchor.dtype)], axis=1)
    owner = (models.target, params.target)
    if models.drafter.config.own_embedding:
        owner = (models.drafter, params.drafter)
    embeddings = apply(*owner, block, method="embed")
    over = Block(positions[:, 0], widths, models.kernels, state.sequences.done)
    hidden, cache = apply(
        models.drafter, params.drafter, embeddings, positions, state.drafter_cache, over
    )
    proposal = propose(models, params, state, hidden[:, 1:], anchor[:, 0], positions[:, 1:])
    return proposal, state._replace(drafter_cache=cache)


def propose(
    models: Models,
    params: Params,
    state: State,
    hidden: Float[Array, "B D _"],
    anchor: Int[Array, " B"],
    indices: Int[Array, "B D"],
) -> Proposal:
    """Drafts of the tokens at `indices`, from the drafter's hidden states of these."""
    assert models.drafter is not None
    target, drafter = (models.target, params.target), (models.drafter, params.drafter)
    s, c, backend = state.sequences, models.drafter.config, models.kernels.matmul
    ranked, keys = models.ranks_rows, s.key
    head = drafter if c.has_head else target
    if not (ranked or models.draws_drafts or c.reads_logits):
        return Proposal(apply(*head, hidden, backend, method="best"))
    if not (models.draws_drafts or c.reads_logits):
        found = apply(*head, hidden, backend, method="best_and_confidence")
        best, sure = models.drafter.surest(anchor, *found)
        return Proposal(best, confidence=sure)
    if ranked:
        # The rank of a row hangs on the drafts of other sequences, and so on noise that decided
        # nothing in earlier steps: what is drafted again is drawn anew.
        keys = jax.vmap(jax.random.fold_in)(keys, s.steps)
    logits = apply(*head, hidden, backend, method="raw_logits")
    logits = apply(*drafter, logits, method="adjust_logits")
    found = apply(*drafter, hidden, anchor, logits, method="candidates")
    choose_drafts = choose_places if found.scores.ndim == 3 else choose_path
    filters = s.filters
    if s.best_drafts is not None:
        filters = filters._replace(temperature=jnp.where(s.best_drafts, 0, filters.temperature))
    rule = Rule(models.draws_drafts, ranked, filters, indices, keys)
    return choose_drafts(rule, found, c.vocab_size)


def rows_of(models: Models, state: State, proposal: Proposal, widths: Int[Array, " B"]) -> Rows:
    """The rows that are verified: all, the best of the batch by the drafter's confidence, or the
    first of every block."""
    batch, drafts = proposal.tokens.shape
    if models.rows is None or drafts == 0:
        return Whole(widths)
    assert isinstance(models.rows, int), "a driver puts a number in AUTO's place"
    if models.rows >= batch * (drafts + 1):
        return Whole(widths)
    if not models.ranks_rows:
        count = models.rows // batch
        return Leading(jnp.minimum(widths, count), count, drafts + 1)
    assert proposal.confidence is not None
    survival = survivals(proposal.confidence)
    counts = pick_rows(survival, widths, state.sequences.done, models.rows)
    return packed(counts, drafts + 1, models.rows)


def verify(
    models: Models, params: Params, state: State, proposal: Proposal
) -> tuple[Verdict, State]:
    """What the target says of the drafts, by its one pass over the blocks."""
    seen, state = look(models, params, state, proposal)
    return judge(models, params, state, proposal, seen)


def look(models: Models, params: Params, state: State, proposal: Proposal) -> tuple[Seen, State]:
    """The target's one pass over the anchor and the drafts, which writes their keys and values."""
    positions, room = block_positions(models, state)
    rows, s = rows_of(models, state, proposal, room), state.sequences
    newest = jnp.take_along_axis(s.tokens, positions[:, :1], axis=1)
    over = rows.over(Block(positions[:, 0], rows.widths, models.kernels, s.done))
    block = rows.pack(jnp.concatenate([newest, proposal.tokens], axis=1))
    hidden, features, cache = apply(
        models.target, params.target, block, rows.pack(positions), state.target_cache, over,
        models.taps,
    )  # fmt: skip
    # Unread logits are not computed: greedy choices do not need them written.
    logits = apply(models.target, params.target, hidden, models.kernels.matmul, method="logits")
    return Seen(hidden, logits, features, rows), state._replace(target_cache=cache)


def judge(
    models: Models,
    params: Params,
    state: State,
    proposal: Proposal,
    seen: Seen,
    allowed: Int[Array, "B W _"] | None = None,
) -> tuple[Verdict, State]:
    """Chooses the target's tokens, and tells which drafts they confirm.

    `allowed` has a bit for each token that a grammar allows at a row, if every draft before that
    row is accepted. So a row that is read has plain decoding's mask.
    """
    positions, room = block_positions(models, state)
    hidden, raw, features, rows = seen
    s, logits = state.sequences, raw
    key, filters = rows.per_row((s.key, s.filters))
    if s.shaping is not None:
        assert models.sampled and isinstance(rows, Whole), "shaped logits are of whole blocks"
        logits = shaped(raw, s.shaping, s.tokens, s.length, proposal.tokens, s.stops)
    if allowed is not None:
        assert models.sampled and isinstance(rows, Whole), "a grammar's rows are those of the block"
        logits = constrained(logits, raw, allowed)
    if s.logprobs is not None:
        raw = judged(raw, logits, filters, s.logprobs)
    if proposal.q is not None:
        p = rows.unpack(probabilities(logits, filters))
        choices, accepted = verify_by_rule(proposal, p, positions + 1, s, rows.widths)
    else:
        if models.sampled:
            choices = choose(logits, rows.pack(positions + 1), key, filters)
        else:
            backend = models.kernels.matmul
            choices = apply(models.target, params.target, hidden, backend, method="best")
        choices = rows.unpack(choices)
        accepted = accepted_drafts(proposal.tokens, choices, rows.widths)
    if state.survey is not None and models.rows is not None:  # other programs share the state
        survival = by_place(proposal.tokens)
        if models.ranks_rows:
            assert proposal.confidence is not None
            survival = survivals(proposal.confidence)
        survey = state.survey.seen(survival, room, rows.widths, accepted, s.done)
        state = state._replace(survey=survey)
    return Verdict(rows.unpack(raw), choices, accepted, features, rows), state


def verify_by_rule(
    proposal: Proposal,
    p: Float[Array, "B W V"],
    indices: Int[Array, "B W"],
    s: Sequences,
    widths: Int[Array, " B"],
) -> tuple[Int[Array, "B W"], Int[Array, " B"]]:
    """Tests drafts drawn from q; where best drafts are taken, the target's draws decide."""
    assert proposal.q is not None
    tested = verify_drafts(proposal.tokens, proposal.q, p, indices, s.key, widths)
    if s.best_drafts is None:
        return tested
    best = s.best_drafts

    def both():
        choices = draw(p, indices, s.key, TARGET)
        accepted = accepted_drafts(proposal.tokens, choices, widths)
        return (
            jnp.where(best[:, None], choices, tested[0]),
            jnp.where(best, accepted, tested[1]),
        )

    return lax.cond(jnp.any(best), both, lambda: tested)


def commit(models: Models, params: Params, state: State, verdict: Verdict) -> State:
    """Keeps the accepted drafts and the bonus token, cut by stops and limits."""
    positions, s = block_positions(models, state)[0], state.sequences
    accepted = jnp.minimum(verdict.accepted, s.max_accept)
    count = jnp.minimum(accepted + 1, s.limit - s.length)
    count, stopped = cut_at_stop(verdict.choices, count, s.stops)
    count = jnp.where(s.done, 0, count)

    row = jnp.arange(positions.shape[1])
    capacity = s.tokens.shape[1]
    # Rows that are not committed go past the capacity, each to a different place, and are dropped.
    keep = row < count[:, None]
    sequence = jnp.arange(count.shape[0])[:, None]
    places = sequence, jnp.where(keep, positions + 1, capacity + row)
    tokens = s.tokens.at[places].set(verdict.choices, mode="drop", unique_indices=True)
    probable = s.logprobs
    if probable is not None:
        probable = noted(probable, verdict.logits, verdict.choices, s.length, keep)
    drafter_cache = state.drafter_cache
    if models.drafter is not None:
        rows = verdict.rows
        context = apply(
            models.drafter, params.drafter, verdict.features, rows.pack(positions), models.kernels,
            method="context",
        )  # fmt: skip
        drafter_cache = tuple(
            rows.write(projected, cache, cache.slots(positions, keep), models.kernels.heads)[1]
            for cache, projected in zip(drafter_cache, context, strict=True)
        )
    target_cache = tuple(layer.committed(count) for layer in state.target_cache)
    drafter_cache = tuple(layer.committed(count) for layer in drafter_cache)
    length = s.length + count
    step = jnp.where(s.done, capacity, s.steps)
    lengths = s.acceptance_lengths.at[sequence[:, 0], step].set(count, mode="drop")
    sequences = s._replace(
        tokens=tokens,
        length=length,
        done=s.done | stopped | (length >= s.limit),
        steps=s.steps + ~s.done,
        acceptance_lengths=lengths,
        logprobs=probable,
    )
    return State(sequences, target_cache, drafter_cache, state.survey)


def speculative_step(models: Models, params: Params, state: State) -> State:
    """One draft, one verification, one commit for every sequence that is not done.

    Shapes never change: a block is always W wide, and room, stop tokens and limits are masks.
    """
    proposal, state = draft(models, params, state)
    verdict, state = verify(models, params, state, proposal)
    return commit(models, params, state, verdict)


def apply(module: nn.Module, params: Any, *args: Any, method: str | None = None) -> Any:
    """A Flax module as the pure function that it is."""
    return module.apply({"params": params}, *args, method=method)
