"""A row budget: which rows it takes, and that no choice of rows changes a bit of the text."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.compiled.programs import compile_programs
from jflash.compiled.shape import Shape, make_request, new_state
from jflash.generate import Pair
from jflash.layers.cache import LayerCache
from jflash.layers.passes import Block
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding
from jflash.records.kernels import XLA
from jflash.records.specs import AttentionSpec
from jflash.rows import empty_survey, packed, pick_rows, survivals
from jflash.speculative import speculative_step
from tests.step.test_one_arithmetic import texts, total
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import (
    drafter_config,
    one_arithmetic,
    prompts,
    random_pair,
    random_params,
    target_config,
)

WIDTH = 8
pytestmark = pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")


def test_an_unread_sequence_sees_only_its_block():
    """A long prompt that is being computed would otherwise keep the texts beside it waiting."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, WIDTH, 4, 16))
    k, v = (jax.random.normal(key, (2, 128, 2, 16)) for key in keys[1:])
    lengths, widths = jnp.array([70, 90]), jnp.full(2, WIDTH)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=None, scale=0.25)
    read = Block(lengths, widths, XLA)
    unread = Block(lengths, widths, XLA, jnp.array([False, True]))
    want = read.seen(spec, q, LayerCache(k, v), None)
    got = unread.seen(spec, q, LayerCache(k, v), None)
    np.testing.assert_array_equal(got[0], want[0])
    far = LayerCache(k.at[1, WIDTH:].set(jnp.nan), v.at[1, WIDTH:].set(jnp.nan))
    np.testing.assert_array_equal(got, unread.seen(spec, q, far, None))
    assert np.isnan(read.seen(spec, q, far, None)[1]).any()


def test_rows_are_the_best_prefixes_of_the_batch():
    """Against a sort; confidences with many ties, and some that are no numbers."""
    rng = np.random.default_rng(0)
    B, W = 5, 6
    picked = jax.jit(pick_rows, static_argnums=3)
    for case in range(60):
        confidence = rng.choice([0.0, 0.5, 1.0, 0.9, np.nan, 7.0], (B, W - 1), p=[0.1] + [0.18] * 5)
        widths, done = rng.integers(1, W + 1, B), rng.random(B) < 0.2
        rows = int(rng.choice([B, B + 1, 13, B * W]))
        survival = survivals(jnp.asarray(confidence, jnp.float32))
        sound = np.where(confidence >= 0, np.minimum(confidence, 1), 0)
        np.testing.assert_allclose(survival, np.cumprod(sound, axis=1), rtol=1e-6)
        counts = np.asarray(picked(survival, jnp.asarray(widths), jnp.asarray(done), rows))

        drafts = [
            (-float(survival[b, k - 1]), k, b)
            for b in range(B)
            for k in range(1, widths[b])
            if not done[b]
        ]
        live = ~done
        best = sorted(drafts)[: rows - live.sum()]
        want = live + np.bincount([b for _, _, b in best], minlength=B)
        np.testing.assert_array_equal(counts, want, err_msg=str(case))

        own = packed(jnp.asarray(counts), W, rows)
        assert len(own.sequence) == rows
        blocks = np.arange(B * W).reshape(B, W)
        flat = np.asarray(own.pack(jnp.asarray(blocks)))
        back = np.asarray(own.unpack(jnp.asarray(flat)))
        for b in range(B):
            np.testing.assert_array_equal(back[b, : counts[b]], blocks[b, : counts[b]])
        if counts.sum():  # what is left over repeats a row that is there
            assert set(flat[counts.sum() :, 0]) <= {flat[counts.sum() - 1, 0]}


def pair_of(vocab: int = 67) -> Pair:
    small = {"vocab_size": vocab, "num_layers": 1}
    own = {
        "mask_token_id": 0,
        "block_size": WIDTH,
        "target_layer_ids": (0,),
        "num_target_layers": 1,
    }
    configs = target_config(**small), drafter_config(**small, **own)
    params = Params(*[random_params(config, seed) for seed, config in enumerate(configs)])
    return one_arithmetic(Pair(Models(Target(configs[0]), Drafter(configs[1]), WIDTH), params))


def windowed(pair: Pair, window: int) -> Pair:
    """The pair with a window in every layer, whose keys and values lie in rings."""
    target, drafter = (
        config.attending(*[{"window": window}] * config.num_layers)
        for config in pair.models.configs
    )
    models = replace(pair.models, target=Target(target), drafter=Drafter(drafter))
    return replace(pair, models=models)


def budgeted(pair: Pair, rows: int) -> Pair:
    return replace(pair, models=replace(pair.models, rows=rows))


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(4, seed=31, low=20, high=140)


def test_a_budget_changes_no_bit_of_the_text(asked):
    """11 rows that four sequences fight over; drafts are the text with a few mistakes."""
    pair = windowed(pair_of(), 70)
    want = texts(pair.plain(), 1, asked)
    assert not total(want, texts(budgeted(pair, 11), 4, asked, replay=want)).differ


def after(pair: Pair, asked, legs):
    """The state after legs of (rows, whether drafts are accepted, steps), and its report."""
    shape, batch = Shape.of(len(asked), 256), len(asked)
    pairs = [budgeted(pair, rows) for rows, _, _ in legs]
    programs = [compile_programs(own.models, own.params, shape) for own in pairs]
    state, report = new_state(pairs[0].models, shape), None
    for b, prompt in enumerate(asked):
        request = make_request(shape, prompt, Decoding(max_new_tokens=30), 7, jax.random.key(0))
        state = programs[0].prefill(pair.params, state, jnp.int32(b), request)
    for program, (_, accept, steps) in zip(programs, legs, strict=True):
        state = state.with_sequences(max_accept=jnp.full(batch, 7 * accept))
        state, report = program.run(pair.params, state, jnp.int32(steps), jnp.zeros(batch, bool))
    return jax.device_get((state, report))


@pytest.mark.parametrize("rows", [None, 2 * WIDTH])
def test_only_programs_that_choose_rows_count_drafts(rows):
    """An engine's programs for other requests step the same state: they verify whole blocks, whose
    drafts no confidence ranks."""
    pair, shape = pair_of(WIDTH), Shape.of(2, 64)
    models = replace(pair.models, rows=rows)
    state = new_state(models, shape)._replace(survey=empty_survey())
    state = state.with_sequences(
        length=jnp.full(2, 5), limit=jnp.full(2, 60), done=jnp.zeros(2, bool)
    )
    after = jax.jit(partial(speculative_step, models))(pair.params, state)
    assert bool(after.survey.counts.any()) == (rows is not None)
    assert (after.sequences.length > 5).all()


def test_a_pause_of_the_drafter_costs_no_acceptance_later(asked):
    """Steps that verify anchors alone write the drafter's context as steps that draft do."""
    pair, batch = pair_of(8), len(asked)  # few tokens, so that drafts are often right
    asked = [[token % 8 for token in prompt] for prompt in asked]
    drafting = (batch * WIDTH, True, 99)
    paused, report = after(pair, asked, [(batch, True, 9), drafting])
    drafted, other = after(pair, asked, [(batch * WIDTH, False, 9), drafting])
    np.testing.assert_array_equal(report.tokens, other.tokens)
    np.testing.assert_array_equal(report.acceptance_lengths, other.acceptance_lengths)
    assert (report.acceptance_lengths[:, :9] == 1).all() and report.acceptance_lengths.max() > 1
    for b, length in enumerate(report.length):
        for one, two in zip(paused.drafter_cache, drafted.drafter_cache, strict=True):
            for x, y in ((one.k, two.k), (one.v, two.v)):
                assert np.abs(x[b, : length - 1]).min(axis=(1, 2)).all()
                np.testing.assert_array_equal(x[b, : length - 1], y[b, : length - 1])


def test_a_budget_is_refused_where_bits_hang_on_the_rows():
    pair = random_pair()
    with pytest.raises(ValueError, match="12 rows to verify: by attention xla, matmul xla"):
        replace(pair.models, rows=12)
    with pytest.raises(ValueError, match="without a drafter"):
        replace(pair.models.plain(), rows=12)
