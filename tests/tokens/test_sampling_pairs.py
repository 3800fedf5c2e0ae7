"""Sampling is the target's distribution where its logits are capped, and by a rounded drafter.

Chi-square as in test_sampling_distribution, whose sizes and weights these pairs have, with 25,000
texts: the planted mistakes leave p below 1e-30.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from jflash import speculative
from jflash.compiled.programs import run
from jflash.devices.mesh import with_context, with_rounding
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models, Params
from tests.support.numpy_filters import filtered
from tests.tokens import test_sampling_distribution as plain
from tests.tokens.test_sampling_distribution import MODES, SOON, p_value, samples, target_logits

MODE = MODES["temperature"]
LEVEL = 0.001 / 2
MULTIPLIER, CAP = 3.0, 2.0  # of which logits of about 1 feel both


def drawing(models: Models):
    """The driver's loop under rule `sampled`."""
    models = replace(models, draft_rule="sampled")
    return jax.jit(lambda *args: run(models, *args), compiler_options=SOON)


def capped(cap: float | None) -> Models:
    """A pair whose target's logits are multiplied, and capped by `cap`. Neither makes a leaf."""
    models, _ = plain.pair()
    config = replace(models.target.config, logit_multiplier=MULTIPLIER, logit_softcap=cap)
    return replace(models, target=Target(config))


def capped_p() -> np.ndarray:
    """By NumPy, of logits that are neither multiplied nor capped."""
    return filtered(CAP * np.tanh(MULTIPLIER * target_logits() / CAP), MODE)


def test_text_of_a_capped_target_follows_the_capped_logits():
    """And by as many texts one would see that the cap, or the multiplier, is dropped."""
    counts, lengths = samples(drawing(capped(CAP)), MODE, 1)
    assert np.mean(lengths > 1) > 0.2, "drafts are accepted"
    assert p_value(counts, MODE, capped_p()) > LEVEL
    for others in (MULTIPLIER * target_logits(), CAP * np.tanh(target_logits() / CAP)):
        assert p_value(counts, MODE, filtered(others, MODE)) < LEVEL


@pytest.mark.long
def test_a_cap_that_is_dropped_fails():
    counts, _ = samples(drawing(capped(None)), MODE, 1)
    assert p_value(counts, MODE, capped_p()) < LEVEL


@functools.cache
def confident() -> tuple[Models, Params]:
    """The pair with a drafter whose rounding is seen: its logits are larger than the target's."""
    models, params = plain.pair()
    assert models.drafter is not None
    config = replace(models.drafter.config, output_multiplier=4.0)
    return replace(models, drafter=Drafter(config), draft_rule="sampled"), params


@functools.cache
def in_float8() -> tuple[Models, Params]:
    models, params = confident()
    models, params = models.drafting_in("float8"), with_context(models, params)
    return models, with_rounding(models, params)


def exact_q(right):
    """Drafts are drawn by the rounded drafter, and tested by what the exact one gives them."""

    def wrong(models, params, state):
        proposal, rest = right(models, params, state)
        exact, _ = right(confident()[0], confident()[1], state)
        return proposal._replace(q=exact.q), rest

    return wrong


@pytest.mark.parametrize("wrong", [False, True], ids=["its own q", "the exact drafter's q fails"])
def test_text_by_a_drafter_in_float8_follows_the_target(wrong, monkeypatch: pytest.MonkeyPatch):
    if wrong:
        monkeypatch.setattr(speculative, "draft", exact_q(speculative.draft))
    models, params = in_float8()
    counts, lengths = samples(drawing(models), MODE, 1, params)
    assert np.mean(lengths > 1) > 0.2, "drafts are accepted"
    assert (p_value(counts, MODE) > LEVEL) == (not wrong)
