"""Probabilities, draws and acceptance by themselves, and requests that draw differently."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.generate import Pair, generate
from jflash.records.decoding import Decoding
from jflash.tokens import sampling
from jflash.tokens.sampling import (
    GREEDY,
    TARGET,
    Filters,
    Sampling,
    accepted_drafts,
    choose,
    cut_at_stop,
    draw,
    filters_of,
    greedy,
    probabilities,
    residual,
    verify_drafts,
)
from tests.support.numpy_filters import filtered
from tests.support.pairs import prompts, random_pair

SAMPLINGS = [
    Sampling(temperature=0.6, top_k=20, top_p=0.95),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.7, min_p=0.05),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=300),  # as many as there are
    Sampling(temperature=1.0, top_k=10**12),
    Sampling(temperature=3.0, top_k=100, top_p=0.7, min_p=0.1),
    Sampling(temperature=1e-4, top_p=0.9),
    Sampling(temperature=1e9),
    GREEDY,
]


def stacked(samplings: list[Sampling]) -> Filters:
    return jax.tree.map(lambda *x: jnp.stack(x), *map(filters_of, samplings))


@pytest.mark.parametrize("kind", ["random", "many ties", "all equal"])
def test_filters_equal_numpys(kind: str):
    """Sequences of one batch, each with its own; ties are as many as NumPy keeps."""
    rng = np.random.default_rng(5)
    logits = {
        "random": rng.normal(0, 4, (len(SAMPLINGS), 30, 300)),
        "many ties": rng.integers(-6, 7, (len(SAMPLINGS), 30, 300)) / 2,
        "all equal": np.full((len(SAMPLINGS), 1, 300), -0.0),
    }[kind].astype(np.float32)
    got = np.asarray(jax.jit(probabilities)(jnp.asarray(logits), stacked(SAMPLINGS)))
    for own, rows, p in zip(SAMPLINGS, logits, got, strict=True):
        want = filtered(rows, own)
        np.testing.assert_array_equal(p > 0, want > 1e-45, err_msg=str(own))
        np.testing.assert_allclose(p, want, rtol=1e-4, atol=1e-30, err_msg=str(own))


def test_neighbours_filters_change_no_bit():
    logits = jnp.asarray(np.random.default_rng(6).normal(0, 3, (4, 2, 50)), jnp.float32)
    plain = Sampling(temperature=0.8)
    alone = probabilities(logits, stacked([plain] * 4))
    mixed = probabilities(logits, stacked([plain, SAMPLINGS[0], GREEDY, SAMPLINGS[3]]))
    np.testing.assert_array_equal(alone[0], mixed[0])
    assert (np.asarray(alone[1]) != np.asarray(mixed[1])).any()


def test_many_small_weights_are_drawn_as_often_as_they_should_and_none_never():
    """Tokens of 1e-6 each, 5 % in all, within 5 σ. Noise of 0, one in 2^24, would spoil both."""
    weights = jnp.full(100_001, 1e-6).at[0].set(0.95).at[50_001:].set(0.0)
    keys, index = jax.random.split(jax.random.key(1), 1000), jnp.zeros((1, 1), int)
    one = lambda key: draw(weights[None, None], index, key[None], TARGET)  # noqa: E731
    drawn = np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(keys)).ravel()
    assert drawn.max() <= 50_000
    assert abs(np.count_nonzero(drawn) - 50) < 5 * np.sqrt(50)


def test_what_rounding_alone_rejects_is_drawn_from_p():
    p = jnp.asarray([[0.0, 0.5, 0.5]])
    assert residual(p, jnp.asarray([[0.0, 0.5, 0.5]])).tolist() == p.tolist()
    assert residual(p, jnp.asarray([[0.5, 0.5, 0.0]])).tolist() == [[0, 0, 0.5]]


def test_drafts_are_judged_within_the_width():
    """Sure drafts are accepted to the width, impossible ones replaced by what is left of p."""
    one = jnp.eye(4)
    p = jnp.stack([one[jnp.asarray([2, 1, 3])]] * 3)
    drafts = jnp.asarray([[2, 1], [2, 1], [2, 0]])
    indices = jnp.broadcast_to(jnp.arange(3), (3, 3))
    keys, widths = jax.random.split(jax.random.key(0), 3), jnp.asarray([3, 2, 3])
    tokens, accepted = verify_drafts(drafts, one[drafts], p, indices, keys, widths)
    assert accepted.tolist() == [2, 1, 1]
    assert tokens[0].tolist() == [2, 1, 3]
    assert tokens[1, :2].tolist() == tokens[2, :2].tolist() == [2, 1]


def test_zero_temperature_is_greedy_and_ties_go_to_the_lowest_id():
    logits = jnp.asarray([[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]])
    keys = jax.random.split(jax.random.key(0), 1)
    index = jnp.asarray([[4, 5]])
    assert greedy(logits).tolist() == [[1, 0]]
    assert choose(logits, index, keys, stacked([GREEDY])).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"temperature": -1.0}, "temperature -1"),
        ({"temperature": 1e-9}, "temperature 1e-09"),
        ({"temperature": 1e39}, "temperature 1e\\+39"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": 1.0, "top_k": -2}, "top_k -2"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p 0"),
        ({"temperature": 1.0, "top_p": 1.01}, "top_p 1.01"),
        ({"temperature": 1.0, "top_p": float("nan")}, "top_p nan"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p -0.1"),
        ({"top_p": 0.9}, "top_p 0.9 needs a temperature"),
        ({"top_k": 5}, "top_k 5 needs a temperature"),
        ({"min_p": 0.1}, "min_p 0.1 needs a temperature"),
        ({"temperature": "0.7"}, "temperature '0.7' must be a number"),
        ({"temperature": 1.0, "top_p": None}, "top_p None must be a number"),
        ({"temperature": 1.0, "min_p": [0.1]}, r"min_p \[0.1\] must be a number"),
        ({"temperature": 1.0, "top_k": 5.0}, "top_k 5.0 must be a whole number"),
    ],
)
def test_impossible_samplings_are_refused(given: dict, what: str):
    with pytest.raises(ValueError, match=what):
        Sampling(**given)


def drawing(rule: str, **changes) -> Pair:
    pair = random_pair(**changes)
    return replace(pair, models=replace(pair.models, sampled=True, draft_rule=rule))


@pytest.mark.parametrize("rule", ["greedy", "sampled"])
def test_each_of_a_batch_draws_by_its_own_in_any_slot(rule: str):
    """Greedy ones give greedy tokens, and the others theirs, whatever the neighbours."""
    pair, batch, new = drawing(rule), prompts(4, seed=20), 16
    own = [GREEDY, Sampling(temperature=0.9, top_p=0.7), Sampling(temperature=1.2), GREEDY]
    how: dict[str, Any] = {"max_new_tokens": new, "seed": 3, "capacity": 256}
    got = generate(pair, batch, [Decoding(sampling=s) for s in own], **how)
    plain = generate(random_pair(), batch, max_new_tokens=new)
    assert [got[i].token_ids for i in (0, 3)] == [plain[i].token_ids for i in (0, 3)]
    others = generate(pair, [batch[2], batch[1], batch[0], batch[3]], sampling=own[1], **how)
    assert got[1].token_ids == others[1].token_ids
    assert got[1].acceptance_lengths == others[1].acceptance_lengths
    assert got[2].token_ids != plain[2].token_ids


def test_samplings_and_prompts_must_be_as_many():
    with pytest.raises(ValueError, match="1 decodings for 2 prompts"):
        generate(random_pair(), prompts(2), [Decoding()])


def test_purposes_of_noise_differ():
    assert len({sampling.DRAFT, sampling.ACCEPT, sampling.TARGET}) == 3


def test_acceptance_is_a_prefix_within_the_width():
    drafts = jnp.asarray([[5, 6, 7], [5, 6, 7], [5, 0, 7], [5, 6, 7]])
    choices = jnp.asarray([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [1, 6, 7, 8]])
    widths = jnp.asarray([4, 2, 4, 4])
    assert accepted_drafts(drafts, choices, widths).tolist() == [3, 1, 1, 0]


def test_a_stop_counts_only_among_the_committed():
    tokens = jnp.asarray([[1, 9, 2, 9]] * 3)
    count, stopped = cut_at_stop(tokens, jnp.asarray([4, 1, 0]), jnp.full((3, 2), 9))
    assert count.tolist() == [2, 1, 0]
    assert stopped.tolist() == [True, False, False]


def test_each_sequence_has_stops_of_its_own():
    tokens = jnp.asarray([[1, 9, 2, 7]] * 4)
    stops = jnp.asarray([[7, -1], [9, -1], [2, 1], [-1, -1]])
    count, stopped = cut_at_stop(tokens, jnp.full(4, 4), stops)
    assert count.tolist() == [4, 2, 1, 4]
    assert stopped.tolist() == [True, True, True, False]


def test_models_refuse_a_width_or_a_rule_that_there_is_not():
    models = random_pair().models
    for width in (0, 1, 9):
        with pytest.raises(ValueError, match=f"block size {width}"):
            replace(models, block_size=width)
    with pytest.raises(ValueError, match="draft rule 'best': greedy or sampled"):
        replace(models, draft_rule="best")
