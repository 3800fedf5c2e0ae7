"""Sampling through the step is the target's distribution, whatever the drafter proposes."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jflash.layers import MaskAttend
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.prefill import prefill
from jflash.programs import Shape, make_request, new_state, run
from jflash.sampling import accepted_drafts, greedy, sample, through_first_stop
from jflash.speculative import Models, Params, apply
from tests.pairs import drafter_config, random_params, target_config

V, TEMPERATURE, SAMPLES, SIGNIFICANCE = 5, 0.7, 40_000, 1e-4
PROMPT = [1, 4, 2]


def small_models() -> tuple[Models, Params]:
    small = {"vocab_size": V, "hidden_size": 16, "num_layers": 2, "head_dim": 8}
    target = target_config(**small)
    own = {"mask_token_id": 0, "block_size": 4, "target_layer_ids": (0,), "num_target_layers": 2}
    drafter = drafter_config(**small | own)
    models = Models(Target(target), Drafter(drafter), 4, sampled=True)
    return models, Params(random_params(target, 3, 0.5), random_params(drafter, 4, 0.5))


def target_joint(models: Models, params: Params) -> np.ndarray:
    """p(t1, t2, t3 | PROMPT) by the target alone, over all V^3 continuations."""
    paths = np.array(list(itertools.product(range(V), repeat=3)))
    tokens = jnp.asarray(np.hstack([np.tile(PROMPT, (len(paths), 1)), paths]), jnp.int32)
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    hidden, _, _ = apply(
        models.target, params.target, tokens, positions, (None, None), MaskAttend(mask)
    )
    logits = apply(models.target, params.target, hidden, method="logits")
    p = np.asarray(jax.nn.softmax(logits / TEMPERATURE))[:, len(PROMPT) - 1 : -1]
    return np.prod(np.take_along_axis(p, paths[:, :, None], axis=2)[:, :, 0], axis=1)


def drawn_counts(
    models: Models, params: Params, shared_noise: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """How often each continuation comes out of prefill and steps, and the lengths of the steps."""
    shape = Shape(SAMPLES // 8, 16, 8, 1, "float32")
    one = shape._replace(batch=1)
    state = new_state(models, one)
    fill = jax.jit(functools.partial(prefill, models, 8))
    # The step needs one committed token: the prompt's last, whose logits the step computes anew.
    request = make_request(one, PROMPT[:-1], 4, (), 3, jax.random.key(0), TEMPERATURE)
    state = fill(params, state, jnp.int32(0), request)
    state = state._replace(tokens=state.tokens.at[0, 2].set(PROMPT[-1]), limit=jnp.full(1, 6))
    step = jax.jit(functools.partial(run, models))
    counts, lengths = np.zeros(V**3), []
    tile = lambda x: jnp.repeat(x, shape.batch, axis=0)  # noqa: E731
    for i in range(8):
        keys = jax.random.split(jax.random.key(100 + i), shape.batch)
        wide = jax.tree.map(tile, state._replace(keys=jnp.zeros(1)))
        wide = wide._replace(keys=jnp.repeat(keys[:1], len(keys)) if shared_noise else keys)
        _, report = step(params, wide, jnp.int32(99), jnp.zeros(shape.batch, bool))
        drawn = np.asarray(report.tokens[:, 3:6])
        counts += np.bincount(drawn @ [V * V, V, 1], minlength=V**3)
        lengths += np.asarray(report.acceptance_lengths)[:, :3].ravel().tolist()
    return counts, np.array(lengths)


def p_value(counts: np.ndarray, joint: np.ndarray) -> float:
    """Chi-square, cells of fewer than 5 expected pooled."""
    joint = joint.astype(np.float64)
    expected = joint / joint.sum() * counts.sum()
    rare = expected < 5
    pool = lambda x: np.append(x[~rare], x[rare].sum()) if rare.any() else x  # noqa: E731
    return float(stats.chisquare(pool(counts), pool(expected)).pvalue)


def test_three_tokens_over_two_steps_follow_the_target():
    models, params = small_models()
    joint = target_joint(models, params)
    counts, lengths = drawn_counts(models, params)
    assert {1, 2} <= set(lengths.tolist()), "drafts must be accepted and rejected"
    assert p_value(counts, joint) > SIGNIFICANCE


def test_the_chi_square_sees_mistakes():
    """A temperature 8 % off, and noise shared by all sequences, are caught."""
    models, params = small_models()
    joint = target_joint(models, params)
    counts, _ = drawn_counts(models, params)
    warm = joint ** (1 / 1.08)
    assert p_value(counts, warm) < SIGNIFICANCE
    same, _ = drawn_counts(models, params, shared_noise=True)
    assert p_value(same, joint) < SIGNIFICANCE


def test_zero_temperature_is_greedy_and_ties_go_to_the_lowest_id():
    logits = jnp.asarray([[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]])
    keys = jax.random.split(jax.random.key(0), 1)
    index = jnp.asarray([[4, 5]])
    assert greedy(logits).tolist() == [[1, 0]]
    assert sample(logits, index, keys, jnp.zeros(1)).tolist() == [[1, 0]]


def test_acceptance_is_a_prefix_within_the_width():
    drafts = jnp.asarray([[5, 6, 7], [5, 6, 7], [5, 0, 7], [5, 6, 7]])
    choices = jnp.asarray([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [1, 6, 7, 8]])
    widths = jnp.asarray([4, 2, 4, 4])
    assert accepted_drafts(drafts, choices, widths).tolist() == [3, 1, 1, 0]


def test_a_stop_counts_only_among_the_committed():
    tokens = jnp.asarray([[1, 9, 2, 9]] * 3)
    count, stopped = through_first_stop(tokens, jnp.asarray([4, 1, 0]), jnp.full((3, 2), 9))
    assert count.tolist() == [2, 1, 0]
    assert stopped.tolist() == [True, False, False]


def test_models_refuse_a_width_that_the_drafter_cannot_run():
    models, _ = small_models()
    for width in (0, 1, 5):
        with pytest.raises(ValueError, match=f"block size {width}"):
            replace(models, block_size=width)
