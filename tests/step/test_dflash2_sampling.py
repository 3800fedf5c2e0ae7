"""Drafts of a DFlash 2 drafter that are drawn leave the target's distribution as it is.

Each draft hangs on the one before it, and so does the q that it is tested with. Chi-square over
four tokens as in test_sampling_distribution, whose target this is.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jflash import speculative
from jflash.compiled.programs import run
from jflash.models.dflash import Drafter
from jflash.pair import Models, Params
from jflash.records.config import Drafter2Config, second_version
from jflash.records.decoding import Sampling
from jflash.speculative import draft
from jflash.state import State
from jflash.tokens import drafts
from jflash.tokens.sampling import filters_of
from tests.support.attention_checks import FULLY
from tests.support.pairs import random_params
from tests.tokens import test_sampling_distribution as version_1
from tests.tokens.test_sampling_distribution import (
    NEW,
    PROMPT,
    V,
    W,
    along,
    p_value,
    paths,
    target_p,
)

K, BATCH, CALLS = 3, 25_000, 8  # candidates of a place; 200,000 samples a mode
MODES = {name: version_1.MODES[name] for name in ("temperature", "top-p", "all")}
LEVEL = 0.001 / (len(MODES) * 4)


@functools.cache
def config() -> Drafter2Config:
    drafter = version_1.pair()[0].drafter
    assert drafter is not None
    return second_version(drafter.config, conv_group_size=2, selector_rank=3, selector_top_k=K)


@functools.cache
def pair() -> tuple[Models, Params]:
    models, params = version_1.pair()
    models = replace(models, drafter=Drafter(config()), draft_rule="sampled")
    return models, Params(params.target, random_params(config(), 5, 0.7))


@functools.cache
def start() -> State:
    return version_1.start_of(*pair())


@functools.cache
def runner(models: Models):
    return jax.jit(functools.partial(run, models), compiler_options=FULLY)  # it runs long


def samples(models: Models, sampling: Sampling, calls: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each continuation comes out, and how many tokens each first step committed."""
    counts, lengths = np.zeros(V**NEW), []
    state = start().with_sequences(key=jnp.zeros(1), filters=filters_of(sampling))
    wide = jax.tree.map(lambda x: jnp.repeat(x, BATCH, axis=0), state)
    for call in range(calls):
        state = wide.with_sequences(key=jax.random.split(jax.random.key(call), BATCH))
        report = runner(models)(pair()[1], state, jnp.int32(99), jnp.zeros(BATCH, bool))[1]
        drawn = np.asarray(report.tokens[:, len(PROMPT) : len(PROMPT) + NEW])
        counts += np.bincount(drawn @ V ** np.arange(NEW)[::-1], minlength=V**NEW)
        lengths.append(np.asarray(report.acceptance_lengths[:, 0]))
    return counts, np.concatenate(lengths)


@functools.cache
def first_scores() -> tuple[np.ndarray, np.ndarray]:
    """Candidates of the first block's places and their scores, as drafts are chosen from."""
    seen = {}

    class Watched(Drafter):
        def candidates(self, hidden, anchor, logits):
            seen["found"] = super().candidates(hidden, anchor, logits)
            return seen["found"]

    models, params = pair()
    watched = Watched(config())
    filters = jax.tree.map(lambda x: x[None], filters_of(Sampling(temperature=1.0)))

    @jax.jit
    def found(params, state):
        draft(replace(models, drafter=watched), params, state)
        return seen["found"]

    candidates, scores = found(params, start().with_sequences(filters=filters))
    return np.asarray(candidates[0]), np.asarray(scores[0], np.float64)


def conditional_q(temperature: float) -> np.ndarray:
    """q of every continuation's first drafts, each after the one before, [V^NEW, W - 1]."""
    candidates, scores = first_scores()
    weights = np.exp((scores - scores.max(axis=-1, keepdims=True)) / temperature)
    weights /= weights.sum(axis=-1, keepdims=True)
    q = np.zeros((V**NEW, W - 1))
    for n, path in enumerate(paths()):
        before = 0
        for i in range(W - 1):
            own = np.flatnonzero(candidates[i] == path[i])
            if not len(own):
                break
            q[n, i] = weights[i, before, own[0]]
            before = own[0]
    return q


@pytest.mark.parametrize(  # a filter alone is a run-time value of the program that "all" runs
    "mode", [*(pytest.param(x, marks=pytest.mark.long) for x in ("temperature", "top-p")), "all"]
)
def test_tokens_over_two_steps_follow_the_target(mode: str):
    sampling = MODES[mode]
    q, p = conditional_q(sampling.temperature), along(target_p(sampling))
    spread = q.reshape(V, V, -1, W - 1)[:, :, 0, 1]
    assert np.ptp(spread, axis=0).max() > 0.1, "q must hang on the draft before"
    counts, lengths = samples(pair()[0], sampling, CALLS)
    assert counts.sum() >= 200_000
    assert np.mean(lengths < NEW) > 0.5, "most continuations must take more than one step"
    assert p_value(counts, sampling) > LEVEL
    # The first i drafts are accepted with the chance that each is both drawn and confirmed.
    both = np.cumprod(np.minimum(p[:, : W - 1], q), axis=1)
    for i in range(1, W):
        rate = both[:: V ** (NEW - i), i - 1].sum()
        assert rate > 0.003
        bound = stats.norm.isf(LEVEL / 2) * np.sqrt(rate * (1 - rate) / len(lengths))
        assert abs(np.mean(lengths > i) - rate) <= bound, (i, rate)


def unconditional(rule, found, vocab):
    """Says of every draft that it was drawn after the place before's best candidate."""
    right = drafts.choose_path(rule, found, vocab)
    q = drafts.choose(rule, found.scores[:, :, 0]).q  # MODES["temperature"] has no other filter
    assert q is not None
    one_hot = jax.nn.one_hot(found.ids, vocab)
    return right._replace(q=jnp.einsum("BTC,BTCV->BTV", q, one_hot, precision="highest"))


def hotter(rule, found, vocab):
    """q without the request's temperature."""
    right = drafts.choose_path(rule, found, vocab)
    assert right.q is not None
    q = right.q**0.7
    return right._replace(q=q / jnp.sum(q, axis=-1, keepdims=True))


@pytest.fixture
def fresh_runner():
    """Programs of this test alone."""
    runner.cache_clear()
    yield
    runner.cache_clear()


@pytest.mark.usefixtures("fresh_runner")
@pytest.mark.parametrize("wrong", [unconditional, pytest.param(hotter, marks=pytest.mark.long)])
def test_a_wrong_q_fails(wrong, monkeypatch):
    """With an eighth of the samples already."""
    monkeypatch.setattr(speculative, "choose_path", wrong)
    counts, _ = samples(pair()[0], MODES["temperature"], CALLS // 8)
    assert p_value(counts, MODES["temperature"]) < LEVEL
