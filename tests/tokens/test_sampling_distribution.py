"""Sampling through the step is the target's distribution, for both draft rules and every filter.

Chi-square over the joint distribution of four tokens, which take two steps and more, against the
target's own: enumerated from its logits, filtered by NumPy. Planted mistakes must fail it.
"""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jflash import speculative
from jflash.compiled.programs import Report, run
from jflash.compiled.shape import Shape, make_request, new_state
from jflash.layers.passes import Rows
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models, Params
from jflash.prefill import prefill
from jflash.records.decoding import Decoding, Sampling
from jflash.speculative import apply, draft
from jflash.state import State
from jflash.tokens import drafts
from jflash.tokens import sampling as sampling_module
from jflash.tokens.sampling import Filters, filters_of
from tests.support.attention_checks import FULLY
from tests.support.numpy_filters import filtered
from tests.support.pairs import drafter_config, random_params, target_config

V, W, NEW, PROMPT = 5, 4, 4, [1, 4, 2]
BATCH, CALLS = 25_000, 8  # 200,000 samples a mode
SOON = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
RULES = ("greedy", "sampled")
MODES = {
    "temperature": Sampling(temperature=0.7),
    "top-k": Sampling(temperature=0.9, top_k=3),
    "top-p": Sampling(temperature=1.2, top_p=0.8),
    "min-p": Sampling(temperature=1.5, min_p=0.25),
    "all": Sampling(temperature=1.1, top_k=4, top_p=0.95, min_p=0.1),
}
# 0.001 for all tests of this file together (Bonferroni): of each mode, its joint distribution and
# the rates at which 1, 2 and 3 drafts are accepted.
LEVEL = 0.001 / (len(RULES) * len(MODES) * 4)
FAR = 0.3  # total variation between drafter and target, at least


@functools.cache
def pair() -> tuple[Models, Params]:
    tiny = dict(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=2,
    )  # fmt: skip
    own = dict(mask_token_id=0, block_size=W, target_layer_ids=(0,), num_target_layers=1)
    target, drafter = target_config(**tiny), drafter_config(**tiny, **own)
    models = Models(Target(target), Drafter(drafter), W, sampled=True)
    return models, Params(random_params(target, 3, 0.4), random_params(drafter, 100, 0.4))


@functools.cache
def paths() -> np.ndarray:
    return np.array(list(itertools.product(range(V), repeat=NEW)))


@functools.cache
def target_logits() -> np.ndarray:
    """The target's logits for every next token of every continuation, [V^NEW, NEW, V]."""
    models, params = pair()
    tokens = jnp.asarray(np.hstack([np.tile(PROMPT, (len(paths()), 1)), paths()]), jnp.int32)
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    attend = Rows(mask)
    hidden, _, _ = apply(models.target, params.target, tokens, positions, (None,), attend)
    logits = apply(models.target, params.target, hidden, method="logits")
    return np.asarray(logits)[:, len(PROMPT) - 1 : -1]


def target_p(sampling: Sampling) -> np.ndarray:
    """p of the next token after every prefix of every continuation, [V^NEW, NEW, V]."""
    return filtered(target_logits(), sampling)


def along(p: np.ndarray) -> np.ndarray:
    """The probabilities of each continuation's own tokens, as many of them as p has rows for."""
    own = np.broadcast_to(paths()[:, : p.shape[-2], None], (V**NEW, p.shape[-2], 1))
    return np.take_along_axis(np.broadcast_to(p, (*own.shape[:2], V)), own, axis=2)[:, :, 0]


@functools.cache
def start() -> State:
    """The start of the pair. It does not depend on the draft rule, and its filters are replaced."""
    return start_of(*pair())


def start_of(models: Models, params: Params) -> State:
    """One slot, all of the prompt but its last token prefilled; that token is known, the newest."""
    shape = Shape(1, 12, 4, 1)
    request = make_request(
        shape, PROMPT[:-1], Decoding(max_new_tokens=NEW + 1), W - 1, jax.random.key(0)
    )
    fill = jax.jit(functools.partial(prefill, models, (shape.chunk,)))
    state = fill(params, new_state(models, shape), jnp.int32(0), request)
    return state.with_sequences(tokens=state.sequences.tokens.at[0, 2].set(PROMPT[-1]))


@functools.cache
def runner(rule: str):
    """The driver's loop, compiled once for all filters of a rule, and fully: it runs long."""
    models = replace(pair()[0], draft_rule=rule)
    return jax.jit(functools.partial(run, models), compiler_options=FULLY)


def samples(
    run_once, sampling: Sampling, calls: int = CALLS, params: Params | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """How often each continuation comes out, and how many tokens each first step committed."""
    params = params or pair()[1]
    counts, lengths = np.zeros(V**NEW), []
    state = start().with_sequences(key=jnp.zeros(1), filters=filters_of(sampling))
    wide = jax.tree.map(lambda x: jnp.repeat(x, BATCH, axis=0), state)
    for call in range(calls):
        state = wide.with_sequences(key=jax.random.split(jax.random.key(call), BATCH))
        report: Report = run_once(params, state, jnp.int32(99), jnp.zeros(BATCH, bool))[1]
        drawn = np.asarray(report.tokens[:, len(PROMPT) : len(PROMPT) + NEW])
        counts += np.bincount(drawn @ V ** np.arange(NEW)[::-1], minlength=V**NEW)
        lengths.append(np.asarray(report.acceptance_lengths[:, 0]))
    return counts, np.concatenate(lengths)


def p_value(counts: np.ndarray, sampling: Sampling, p: np.ndarray | None = None) -> float:
    """Chi-square against the joint distribution of `p`, or the target's; cells under 5 expected are
    pooled.

    A continuation that the filters forbid is no chance: 0.
    """
    p = target_p(sampling) if p is None else p
    expected = np.prod(along(p), axis=1) * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    assert not 0 < expected[rare].sum() < 5, "together they would be too rare still"
    cells = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
    kept = cells[1] > 0
    observed, wanted = cells[0][kept], cells[1][kept]
    return float(stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


@functools.cache
def drafter_logits() -> np.ndarray:
    """Of the first block's drafts, [W - 1, V], up to a constant."""
    models, params = pair()
    plain = jax.tree.map(lambda x: x[None], filters_of(Sampling(temperature=1.0)))
    draws = functools.partial(draft, replace(models, draft_rule="sampled"))
    proposal, _ = jax.jit(draws)(params, start().with_sequences(filters=plain))
    assert proposal.q is not None
    return np.log(np.asarray(proposal.q[0], np.float64))


def drafter_q(rule: str, sampling: Sampling) -> np.ndarray:
    """What the first block's drafts are drawn from, [W - 1, V], by NumPy's filters."""
    logits = drafter_logits()
    return filtered(logits, sampling if rule == "sampled" else Sampling())


# One filter alone, or none, is a run-time value of the program that "all" runs: those are the long
# tests, but for the case that most planted mistakes below are set against.
SHORT = (*((rule, "all") for rule in RULES), ("sampled", "temperature"))
CASES = [
    pytest.param(*x, marks=() if x in SHORT else pytest.mark.long)
    for x in itertools.product(RULES, MODES)
]


@pytest.mark.parametrize(("rule", "mode"), CASES)
def test_tokens_over_two_steps_follow_the_target(rule: str, mode: str):
    sampling = MODES[mode]
    p, q = target_p(sampling), drafter_q(rule, sampling)
    reach = np.prod(along(p), axis=1)
    distance = np.abs(p[:, : W - 1] - q).sum(axis=2) / 2  # of every prefix and position
    assert (reach @ distance >= FAR).all(), reach @ distance

    counts, lengths = samples(runner(rule), sampling)
    assert counts.sum() >= 200_000
    assert np.mean(lengths < NEW) > 0.5, "most continuations must take more than one step"
    assert p_value(counts, sampling) > LEVEL

    # The first i drafts are accepted with the chance that each is both drawn and confirmed.
    both = np.cumprod(np.minimum(along(p[:, : W - 1]), along(q)), axis=1)
    for i in range(1, W):
        rate = both[:: V ** (NEW - i), i - 1].sum()
        spread = np.sqrt(rate * (1 - rate) / len(lengths))
        bound = stats.norm.isf(LEVEL / 2) * spread
        assert abs(np.mean(lengths > i) - rate) <= bound, (i, rate)


def no_residual(patch: pytest.MonkeyPatch) -> None:
    """After a rejection p is drawn from, not what q leaves of it."""
    patch.setattr(sampling_module, "residual", lambda p, q: p)


def shared_noise(patch: pytest.MonkeyPatch) -> None:
    """A draft's draw and its test use the same random bits."""
    patch.setattr(sampling_module, "ACCEPT", sampling_module.DRAFT)


def unfiltered_p(patch: pytest.MonkeyPatch) -> None:
    """The filters apply to the drafter's distribution alone."""
    right = speculative.probabilities

    def wrong(logits, filters):
        if logits.shape[1] == W:
            none = filters_of(Sampling(temperature=1.0))
            off = [jnp.full_like(old, new) for old, new in zip(filters[1:], none[1:], strict=True)]
            filters = Filters(filters.temperature, *off)
        return right(logits, filters)

    patch.setattr(speculative, "probabilities", wrong)


def noise_by_row(patch: pytest.MonkeyPatch) -> None:
    """Noise hangs on the row of the block: a step's rejection decides the next step's draws too."""

    def rows(indices):
        return jnp.broadcast_to(jnp.arange(indices.shape[1]), indices.shape)

    draw, verify = drafts.draw, speculative.verify_drafts
    patch.setattr(drafts, "draw", lambda w, i, *rest: draw(w, rows(i), *rest))
    patch.setattr(
        speculative,
        "verify_drafts",
        lambda d, q, p, i, *x: verify(d, q, p, rows(i), *x),
    )


MISTAKES = [
    (no_residual, "temperature"),
    (shared_noise, "temperature"),
    (unfiltered_p, "all"),
    (noise_by_row, "temperature"),
]


@pytest.mark.parametrize(("mistake", "mode"), MISTAKES)
def test_a_planted_mistake_fails(mistake, mode: str, monkeypatch: pytest.MonkeyPatch):
    """With a quarter of the samples already."""
    mistake(monkeypatch)
    models = replace(pair()[0], draft_rule="sampled")
    wrong = jax.jit(lambda *args: run(models, *args), compiler_options=SOON)
    counts, _ = samples(wrong, MODES[mode], CALLS // 4)
    assert p_value(counts, MODES[mode]) < LEVEL
