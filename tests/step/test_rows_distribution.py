"""A row budget leaves the target's distribution as it is, for drafts that are drawn.

Four sequences share seven rows, so that the drafter's confidence decides whose drafts are tested.
Chi-square as in test_sampling_distribution, whose pair and whose DFlash 2 drafter these are; a
budget that knows what was drawn must fail it.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import speculative
from jflash.compiled.programs import run
from jflash.records.kernels import XLA, Kernels
from jflash.rows import empty_survey
from jflash.speculative import block_positions
from jflash.tokens.sampling import filters_of, uniforms
from tests.step import test_dflash2_sampling as version_2
from tests.tokens import test_sampling_distribution as version_1
from tests.tokens.test_sampling_distribution import MODES, NEW, PROMPT, SOON, V, p_value

BATCH, ROWS, GROUPS = 4, 7, 2500
MODE = MODES["temperature"]
LEVEL = 0.001 / 2


def samples(version, calls: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each continuation comes out, and the histogram of what the steps committed."""
    models, params = version.pair()
    kernels = Kernels(*["cpu"] * len(XLA))
    models = replace(models, draft_rule="sampled", kernels=kernels, rows=ROWS)
    start = version.start()._replace(survey=None)
    start = start.with_sequences(key=jnp.zeros(1), filters=filters_of(MODE))
    wide = jax.tree.map(lambda x: jnp.repeat(x, BATCH, axis=0), start)

    def group(keys):
        state = wide.with_sequences(key=keys)._replace(survey=empty_survey())
        report = run(models, params, state, jnp.int32(99), jnp.zeros(BATCH, bool))[1]
        return report.tokens, report.acceptance_lengths

    groups = jax.jit(jax.vmap(group), compiler_options=SOON)
    counts, lengths = np.zeros(V**NEW), np.zeros(5)
    for call in range(calls):
        keys = jax.random.split(jax.random.key(call), (GROUPS, BATCH))
        tokens, accepted = (np.asarray(x).reshape(GROUPS * BATCH, -1) for x in groups(keys))
        drawn = tokens[:, len(PROMPT) : len(PROMPT) + NEW]
        counts += np.bincount(drawn @ V ** np.arange(NEW)[::-1], minlength=V**NEW)
        lengths += np.bincount(accepted.reshape(-1), minlength=5)[:5]
    return counts, lengths


@pytest.mark.parametrize(
    "version",
    [version_1, pytest.param(version_2, marks=pytest.mark.long)],
    ids=["DFlash", "DFlash 2"],
)
def test_rows_that_are_fought_over_leave_the_distribution(version):
    counts, lengths = samples(version, 3)  # more than a budget that knows a draw needs to fail
    assert counts.sum() == 3 * GROUPS * BATCH
    assert lengths[2] > 0.05 * lengths[1:].sum(), "drafts are tested and accepted"
    assert p_value(counts, MODE) > LEVEL


def drawn_token(models, state, proposal):
    """How likely the token was that was drawn, in place of the most likely one."""
    return jnp.take_along_axis(proposal.q, proposal.tokens[..., None], axis=-1)[..., 0]


def accept_draws(models, state, proposal):
    """The noise that will decide on acceptance."""
    indices = block_positions(models, state)[0][:, 1:]
    return 1 - uniforms(indices, state.sequences.key)


@pytest.mark.parametrize(
    "confidence", [pytest.param(drawn_token, marks=pytest.mark.long), accept_draws]
)
def test_a_budget_that_knows_a_draw_fails(confidence, monkeypatch: pytest.MonkeyPatch):
    right = speculative.rows_of

    def wrong(models, state, proposal, widths):
        seen = proposal._replace(confidence=confidence(models, state, proposal))
        return right(models, state, seen, widths)

    monkeypatch.setattr(speculative, "rows_of", wrong)
    counts, _ = samples(version_1, 2)
    assert p_value(counts, MODE) < LEVEL
