"""The algorithm and nothing else: draft, verify, accept, commit, in one pure function.

Its shapes are fixed: a compiled step serves every length, room, limit and acceptance.

Axes: B batch, W block width, D = W - 1 drafts, S capacity, E stop ids, V vocabulary. A sequence of
committed length n holds its newest token at index n - 1; that token has no keys and values in the
target's cache yet.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key

from jflash.cache import Cache, LayerState
from jflash.config import DrafterConfig, TargetConfig
from jflash.decoding import DRAFT_RULES
from jflash.drafts import Proposal, Rule, choose_path, choose_places
from jflash.kernels import XLA, Kernels
from jflash.logprobs import Logprobs, judged, noted
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.passes import Block
from jflash.rows import Rows, Survey, Whole, packed, pick_rows, survivals
from jflash.sampling import (
    TARGET,
    Filters,
    accepted_drafts,
    choose,
    cut_at_stop,
    draw,
    probabilities,
    verify_drafts,
)
from jflash.shaping import Shaping, constrained, shaped
from jflash.specs import FLOAT8
from pallas_kernels.gated_delta import CHUNK


@dataclass(frozen=True)
class Models:
    """What is compiled: two modules, the block width W, the kernels, and how draws are done.

    Without a drafter nothing is drafted and each step commits one token, at any width. Unless
    `sampled`, every request is greedy, and so are the drafts, whatever the draft rule. `rows` are
    those that a step verifies over the whole batch, all with None; with as many as there are
    sequences nothing is drafted, and the drafter's context is still written.
    """

    target: Target
    drafter: Drafter | None = None
    block_size: int = 1
    kernels: Kernels = XLA
    sampled: bool = False
    draft_rule: str = "sampled"
    rows: int | str | None = None  # AUTO stands for the numbers that a driver chooses from
    mesh: Mesh | None = None  # of the devices that share the models; see jflash.mesh

    def __post_init__(self) -> None:
        largest = self.drafter.config.block_size if self.drafter else self.block_size
        smallest = 2 if self.drafter else 1
        if not smallest <= self.block_size <= largest:
            raise ValueError(
                f"block size {self.block_size} must be within {smallest} … {largest} "
                "(a drafter may run narrower than it was trained, never wider)"
            )
        if self.target.config.deltas and self.block_size > CHUNK:
            raise ValueError(
                f"block size {self.block_size} is above {CHUNK}, the most that a target with "
                "recurrent layers takes"
            )
        if self.draft_rule not in DRAFT_RULES:
            raise ValueError(f"draft rule {self.draft_rule!r}: {' or '.join(DRAFT_RULES)}")
        if self.rows is not None:
            self._check_rows()

    def _check_rows(self) -> None:
        if self.target.config.deltas:
            raise ValueError(
                f"{self.rows} rows to verify: a target with recurrent layers takes all"
            )
        if self.drafter is None:
            raise ValueError(f"{self.rows} rows to verify: without a drafter there are no drafts")
        if not self.one_arithmetic:
            others = set(Kernels._fields) - self.kernels.one_arithmetic
            used = (f"{op} {name}" for op, name in self.kernels._asdict().items() if op in others)
            raise ValueError(
                f"{self.rows} rows to verify: by {', '.join(used)} a token's bits hang on the "
                "number of rows; only kernels of one arithmetic may verify fewer"
            )

    @property
    def configs(self) -> tuple[TargetConfig | DrafterConfig, ...]:
        """The target's, then the drafter's if there is one."""
        return tuple(model.config for model in (self.target, self.drafter) if model is not None)

    @property
    def dtype(self) -> str:
        """What parameters, activations and caches are."""
        return self.target.config.dtype

    @property
    def one_arithmetic(self) -> bool:
        """Whether a token's bits are the same at every width, batch, capacity and chunk."""
        c = self.target.config
        absent = {op for op, there in (("experts", c.experts), ("delta", c.deltas)) if not there}
        return set(Kernels._fields) - absent <= self.kernels.one_arithmetic

    @property
    def draws_drafts(self) -> bool:
        return self.drafter is not None and self.sampled and self.draft_rule == "sampled"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids if self.drafter else ()

    @property
    def max_accept(self) -> int:
        """The most drafts that a step can accept."""
        return self.block_size - 1 if self.drafter else 0

    def of_dtype(self, dtype: str) -> "Models":
        """The same models, in another dtype."""

        def cast(model: Any) -> Any:
            return model and model.clone(config=replace(model.config, dtype=dtype))

        return replace(self, target=cast(self.target), drafter=cast(self.drafter))

    def drafting_in(self, dtype: str) -> "Models":
        """The models, whose drafter's products are rounded to 'float8', or with '' are not.

        ValueError for another dtype, and for one without a drafter.
        """
        if dtype not in ("", FLOAT8.form):
            raise ValueError(f"drafter_dtype {dtype!r} is not {FLOAT8.form!r}")
        if self.drafter is None:
            if dtype:
                raise ValueError(f"drafter_dtype {dtype!r} without a drafter")
            return self
        config = replace(self.drafter.config, products=dtype)
        return replace(self, drafter=self.drafter.clone(config=config))

    def plain(self) -> "Models":
        """The target at width 1: plain decoding, which a pair is measured against."""
        return replace(self, drafter=None, block_size=1, rows=None)

    def width(self, batch: int) -> int:
        """Rows of a block: 1 where a step verifies only the anchors."""
        return 1 if self.rows == batch else self.block_size


class Params(NamedTuple):
    """Parameters of both models, plain pytrees; the drafter's is None without one."""

    target: Any
    drafter: Any = None


class Sequences(NamedTuple):
    """What a step keeps of each sequence of a batch; one row of it, without B, is a request."""

    tokens: Int[Array, "*B S"]
    length: Int[Array, "*B"]  # committed tokens, prompt included
    limit: Int[Array, "*B"]  # the length at which a sequence ends
    stops: Int[Array, "*B E"]  # stop ids, filled up with -1
    done: Bool[Array, "*B"]
    max_accept: Int[Array, "*B"]  # drafts accepted at most; 0 makes the step the oracle
    key: Key[Array, "*B"]
    filters: Filters
    steps: Int[Array, "*B"]
    acceptance_lengths: Int[Array, "*B S"]  # tokens committed by each step
    shaping: Shaping | None = None  # for all requests or for none
    logprobs: Logprobs | None = None
    best_drafts: Bool[Array, "*B"] | None = None  # draft rule greedy for these


class State(NamedTuple):
    """Everything a step reads and writes. Donated: use only what the last call returned."""

    sequences: Sequences
    target_cache: tuple[LayerState, ...]
    drafter_cache: tuple[Cache, ...]
    survey: Survey | None = None  # with Models.rows

    def with_sequences(self, **changes: Any) -> "State":
        """The state with other values of some fields of its sequences."""
        return self._replace(sequences=self.sequences._replace(**changes))


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
    over = Block(positions[:, 0], widths, models.kernels)
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
    ranked, keys = models.rows is not None, s.key
    head = drafter if c.has_head else target
    if not (ranked or models.draws_drafts or c.reads_logits):
        return Proposal(apply(*head, hidden, backend, method="best"))
    by_head = models.drafter.sure_by_head and not c.has_head and models.target.config.shards == 1
    if by_head and not (models.draws_drafts or c.reads_logits):
        best, sure = apply(*target, hidden, backend, method="best_and_confidence")
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
    """The rows that are verified: all, or the best of the batch by the drafter's confidence."""
    batch, drafts = proposal.tokens.shape
    if models.rows is None or drafts == 0:
        return Whole(widths)
    assert isinstance(models.rows, int), "a driver puts a number in AUTO's place"
    if models.rows >= batch * (drafts + 1):
        return Whole(widths)
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
    over = rows.over(Block(positions[:, 0], rows.widths, models.kernels))
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
    if state.survey is not None and proposal.confidence is not None:
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
