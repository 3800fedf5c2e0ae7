"""How many rows a step verifies: what the choice makes of what drafts came to, and its text."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jflash.budget import row_choice, row_times
from jflash.budget.rounds import Step
from jflash.budget.row_choice import (
    ChosenRows,
    Estimate,
    EstimateByPlace,
    default_rows,
    programs_for,
    row_counts,
    with_rows,
)
from jflash.budget.row_times import kept_times
from jflash.compiled.shape import Shape, new_state
from jflash.generate import generate, models_for
from jflash.layers.gather import AXIS
from jflash.models.decoder import Target
from jflash.records.kernels import AUTO, XLA
from jflash.records.specs import MoeSpec
from jflash.rows import Survey, by_place, empty_survey, packed, pick_rows, survivals
from jflash.serving.calls.steps import of_all_kinds
from tests.step.test_rows import pair_of
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import prompts

pytestmark = pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")
BATCH, WIDTH = 8, 8
MS = {8: 2.0, 16: 2.6, 32: 2.9, 48: 3.4, 64: 6.0}
TIMES = {rows: Step(ms) for rows, ms in MS.items()}
picked = jax.jit(pick_rows, static_argnums=3)
seen = jax.jit(Survey.seen)


class Looked(NamedTuple):
    survey: Survey


class Text:
    """Runs of every number of rows over a text, without a model.

    The drafter is `sure` of its drafts, more or less; they come true with chance `right`. Rows are
    picked by the step's rule.
    """

    def __init__(self, right: float, sure: float):
        self.right, self.sure = right, sure
        self.random, self.survey, self.ms = np.random.default_rng(0), empty_survey(), 0.0
        self.tokens = 0

    def runs(self) -> dict[int, Any]:
        return {rows: lambda *args, rows=rows: self.run(rows, *args) for rows in MS}

    def run(self, rows: int, params: Any, state: Any, steps: Any, cancel: Any):
        for _ in range(int(steps)):
            self.step(rows)
        return state, Looked(self.survey)

    def step(self, rows: int) -> None:
        places = WIDTH - 1 if rows > BATCH else 0
        sure = np.clip(self.random.normal(self.sure, 0.1, (BATCH, places)), 0, 1)
        survival = survivals(jnp.asarray(sure, jnp.float32))
        room, done = jnp.full(BATCH, places + 1), jnp.zeros(BATCH, bool)
        widths = room
        if BATCH < rows < BATCH * WIDTH:
            widths = packed(picked(survival, room, done, rows), WIDTH, rows).widths
        true = np.cumprod(self.random.random((BATCH, places)) < self.right, axis=1).sum(axis=1)
        accepted = jnp.minimum(jnp.asarray(true), widths - 1)
        self.survey = seen(self.survey, survival, room, widths, accepted, done)
        self.tokens += BATCH + int(accepted.sum())
        self.ms += MS[rows]


def decoded(chosen: ChosenRows, calls: int) -> dict[int, int]:
    """Steps by rows, of so many more calls."""
    before = dict(chosen.steps)
    for _ in range(calls):
        chosen.run(None, None, jnp.int32(99), jnp.zeros(BATCH, bool))
    chosen._look()
    return {rows: chosen.steps[rows] - before[rows] for rows in MS}


def test_rows_follow_what_drafts_come_to():
    """A drafter that is right all along, one that is right at first, one that only believes it is;
    and a text that becomes hard and then easy again."""
    good = Text(right=0.98, sure=0.95)
    steps = decoded(ChosenRows(None, good.runs(), TIMES, 0.0), 12)
    assert max(steps, key=steps.__getitem__) == 48, steps  # the last 16 rows cost 2.6 ms

    half = Text(right=0.5, sure=0.5)
    steps = decoded(ChosenRows(None, half.runs(), TIMES, 0.0), 12)
    assert max(steps, key=steps.__getitem__) in (16, 32), steps

    text = Text(right=0.02, sure=0.9)
    chosen = ChosenRows(None, text.runs(), TIMES, 0.0)
    decoded(chosen, 6)
    begin, tokens = text.ms, text.tokens
    steps = decoded(chosen, 60)
    assert steps[8] > 700 and sum(steps.values()) > steps[8], steps  # plain, and it probes
    assert (text.tokens - tokens) / (text.ms - begin) > 0.99 * BATCH / MS[8]
    text.right = 0.98
    decoded(chosen, 40)
    steps = decoded(chosen, 4)
    assert steps[8] == 0, steps


def test_a_probe_costs_at_most_a_hundredth_of_the_time_whatever_a_call_has_of_steps():
    """A drafter that is never right, in an engine's calls of four steps."""
    text = Text(right=0.0, sure=0.9)
    chosen = ChosenRows(None, dict.fromkeys(MS), TIMES, 0.0, fewest=4)
    spent = dict.fromkeys(MS, 0.0)
    for call in range(450):
        rows, _ = chosen.pick()
        for _ in range(4):
            text.step(rows)
        spent[rows] += 4 * MS[rows] * (call >= 8)
        chosen.seen(rows, chosen.estimate.newest(jax.device_get(text.survey)))
    probing = sum(ms for rows, ms in spent.items() if rows > BATCH)
    assert 0 < probing < 0.01 * spent[BATCH]


def test_expected_tokens_count_the_best_rows():
    text = Text(right=0.9, sure=0.9)
    chosen = ChosenRows(None, text.runs(), TIMES, 0.0)
    decoded(chosen, 10)
    for rows, tokens in zip(MS, chosen.estimate.tokens([*MS]), strict=True):
        probe = Text(right=0.9, sure=0.9)
        for _ in range(60):
            probe.step(rows)
        assert tokens == pytest.approx(probe.tokens / 60, rel=0.07), rows


def test_without_drafts_a_step_gains_none_whoever_is_done():
    """Rows of sequences that are done are spare, but the fewest rows have no drafts."""
    text = Text(right=0.9, sure=0.9)
    chosen = ChosenRows(None, text.runs(), TIMES, 0.0)
    decoded(chosen, 10)
    chosen.pick(live=2)
    fewest, *others = chosen.estimate.tokens([*MS])
    assert fewest == 2 and others == pytest.approx([others[-1]] * 4)
    assert others[0] > 5  # sixteen rows are all that two blocks have


def test_drafts_of_few_sequences_predict_those_of_many():
    """A burst begins with few sequences; while nothing is drafted the others come."""
    text = Text(right=0.9, sure=0.9)
    for _ in range(20):
        text.step(64)
    one, every = Estimate(), Estimate()
    counts = np.array(text.survey.counts)
    one.add(Survey(counts))
    every.add(Survey(np.append(BATCH * counts[:-1], counts[-1])))
    most = BATCH * WIDTH
    assert one.tokens([8, most])[1] == pytest.approx(every.tokens([8, 512])[1] / BATCH, rel=0.05)
    one.add(Survey(np.append(np.zeros(len(counts) - 2), [BATCH * BATCH, 1])))
    several = (8, 64, 128, 256, 512)
    assert one.tokens(several) == pytest.approx(every.tokens(several), rel=0.05)


def test_an_estimate_by_place_counts_what_each_place_brought():
    """Three texts, one done: blocks of 8 whose drafts come true to the third place, or to none."""
    estimate, widths, done = EstimateByPlace(), jnp.asarray([8, 8, 8]), jnp.asarray([0, 0, 1], bool)
    seen = empty_survey()
    for i in range(400):
        accepted = jnp.asarray([3, 0 if i % 4 else 7, 5])
        seen = seen.seen(by_place(jnp.zeros((3, 7), int)), widths, widths, accepted, done)
    estimate.add(jax.device_get(seen))
    assert estimate.live == 2
    want = 2 + np.cumsum([0] + [1.25] * 3 + [0.25] * 4)
    rows = [3 * w for w in range(1, 9)]
    assert estimate.tokens(rows) == pytest.approx(want, rel=0.03)
    assert estimate.tokens([3, 12, 24])[1:] == pytest.approx(want[[3, 7]], rel=0.03)


def test_a_place_that_is_not_verified_follows_the_one_before_it():
    """One text, whose drafts come true three times in four; steps verify two drafts of seven."""
    estimate, rng = EstimateByPlace(), np.random.default_rng(0)
    for _ in range(3000):
        right = rng.random(2) < 0.75
        accepted = jnp.asarray([int(right[0]) + int(right.all())])
        now = empty_survey().seen(
            by_place(jnp.zeros((1, 7), int)), jnp.asarray([8]), jnp.asarray([3]), accepted,
            jnp.zeros(1, bool),
        )  # fmt: skip
        estimate.add(jax.device_get(now))
    want = np.cumsum(0.75 ** np.arange(8))
    assert estimate.tokens(range(1, 9)) == pytest.approx(want, rel=0.15)
    fresh = EstimateByPlace(live=1.0, drafted=1.0, offered=np.ones(len(estimate.offered)))
    assert fresh.tokens([1, 4])[1] == pytest.approx(1 + 0.7 + 0.49 + 0.343)


def test_auto_gives_plain_decodings_text(monkeypatch):
    monkeypatch.setattr(row_choice, "WIDTHS", (1, 2))
    monkeypatch.setattr(row_choice, "STEPS", 3)
    pair, asked = pair_of(8), [[t % 8 for t in p] for p in prompts(2, seed=31, low=20, high=60)]
    auto = replace(pair, models=replace(pair.models, rows=AUTO))
    want = generate(pair, asked, max_new_tokens=40)
    found = generate(auto, asked, max_new_tokens=40)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]
    shape = Shape.of(2, 256)
    chosen = programs_for(auto.models, pair.params, shape)
    assert isinstance(chosen, ChosenRows) and set(chosen.times) == {2, 4, 16}
    for step in chosen.times.values():
        assert 0 < step.dispatch < 1000 and 0 < step.ms < 1000, chosen.times
    assert row_counts(2, 8) == (2, 4, 16)
    assert with_rows(pair.models, AUTO, 8).rows == AUTO
    for other in (pair.models.plain(), replace(pair.models, kernels=XLA)):  # nothing to choose
        assert with_rows(other, AUTO, 8) == other
    assert with_rows(pair.models, AUTO, 2) == with_rows(pair.models, None, 8) == pair.models
    with pytest.raises(ValueError, match="3 rows to verify for 4 sequences: each needs one"):
        programs_for(replace(pair.models, rows=3), pair.params, shape._replace(batch=4))


def test_rows_are_chosen_by_default_on_a_gpu_from_batch_8_on():
    of_cpu = pair_of(8).models
    of_gpu = replace(of_cpu, kernels=of_cpu.kernels._replace(attention="canonical"))
    assert default_rows(of_gpu, 8) == AUTO and default_rows(of_gpu, 7) is None
    assert default_rows(of_cpu, 8) is None and of_cpu.kernels.attention == "cpu"
    mesh = Mesh(np.array(jax.local_devices()[:1]), (AXIS,))
    assert default_rows(replace(of_gpu, mesh=mesh), 8) == AUTO  # several share the pair
    moe = MoeSpec(num_experts=4, experts_per_token=2, intermediate_size=32, renormalise=True)
    sparse = of_gpu.target.config.with_experts(moe, range(1))
    assert default_rows(replace(of_gpu, target=Target(sparse)), 1) == AUTO
    plain = of_gpu.plain()
    assert with_rows(plain, default_rows(plain, 8), 8) == plain


def test_auto_follows_experts_at_batch_1_and_keeps_a_seeds_text():
    models = pair_of(8).models
    moe = MoeSpec(num_experts=4, experts_per_token=2, intermediate_size=32, renormalise=True)
    config = models.target.config.with_experts(moe, range(1))
    sparse = replace(models, target=Target(config), kernels=models.kernels._replace(experts="cpu"))
    assert with_rows(sparse, AUTO, 1).rows == AUTO and with_rows(models, AUTO, 1).rows is None
    drawn = replace(models, rows=AUTO, sampled=True, draft_rule="sampled")
    of_each = models_for(drawn, [])
    assert of_each == replace(drawn, rows=None)  # no times
    assert models_for(replace(drawn, draft_rule="greedy"), []).rows == AUTO
    assert of_all_kinds(replace(models, rows=AUTO), 2).rows is None
    assert of_all_kinds(replace(models, rows=9), 2).rows == 16


def test_times_are_measured_once_and_kept(monkeypatch, tmp_path):
    models, shape, counts = pair_of().models, Shape.of(2, 256), []
    times = {2: Step(1.25, 0.5), 16: Step(3.0, 0.75)}

    def measure() -> dict[int, Step]:
        counts.append(1)
        return times

    for _ in range(2):
        monkeypatch.setattr(row_times, "_TIMES", {})
        assert kept_times(models, shape, (2, 16), measure, tmp_path) == times
    assert len(counts) == 1
    (file,) = tmp_path.iterdir()
    file.write_text("half a fi")
    monkeypatch.setattr(row_times, "_TIMES", {})
    assert kept_times(models, shape, (2, 16), measure, tmp_path) == times and len(counts) == 2


def test_noise_for_one_shape_is_compiled_once(compilations):
    """Each number of slots fills caches before it is timed, and each layer has two leaves."""
    models, shape = pair_of().models, Shape.of(5, 320)
    for expected in (True, False):
        state = jax.block_until_ready(new_state(models, shape))
        compilations.clear()
        row_times.with_texts(models, state)
        assert bool(compilations) is expected
