"""Drafters with windows: what must hold for any weights holds with rings too.

That they draft as the reference does is in test_reference_parity.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.compiled import shape as shapes
from jflash.compiled.shape import Shape, make_request, new_state
from jflash.generate import Pair, generate
from jflash.layers import cache
from jflash.layers.cache import RingCache, empty_cache, ring_slots, write_context
from jflash.models.dflash import Drafter
from jflash.pair import Params
from jflash.prefill import prefill
from jflash.proof import check as lossless_check
from jflash.records.config import second_version
from jflash.records.decoding import Decoding
from jflash.speculative import speculative_step
from tests.support.lossless_case import small_case
from tests.support.pairs import drafter_config, prompts, random_pair, random_params

SIGHTS = {
    "mixed": (dict(window=20, causal=True), dict()),
    "two-sided": (dict(window=3), dict(window=57)),
}


def as_version_2(pair: Pair) -> Pair:
    """The pair with a random DFlash 2 drafter of the same sizes and windows."""
    assert pair.models.drafter is not None
    config = second_version(
        pair.models.drafter.config, conv_group_size=4, selector_rank=6, selector_top_k=5
    )
    params = Params(pair.params.target, random_params(config, 1))
    return Pair(replace(pair.models, drafter=Drafter(config)), params)


@pytest.mark.parametrize(("sights", "version"), [("mixed", 1), ("two-sided", 2)])
def test_any_windowed_drafter_gives_the_oracles_tokens(sights, version):
    """In batches, where neighbours and slots change nothing, with prompts longer than a ring."""
    batch = [*prompts(1, seed=3, low=150, high=180), *prompts(3, seed=4, low=1, high=90)]
    pair = random_pair(sights=SIGHTS[sights])
    pair = pair if version == 1 else as_version_2(pair)
    how = {"max_new_tokens": 60, "capacity": 512, "prefill_chunk": 128}
    oracle = generate(pair, batch, oracle=True, **how)
    got = generate(pair, batch, **how)
    moved = generate(pair, batch[::-1], **how)[::-1]
    for one, other, want in zip(got, moved, oracle, strict=True):
        assert one.token_ids == other.token_ids == want.token_ids
        assert one.acceptance_lengths == other.acceptance_lengths


def drafted(pair, sizes, rounds: int = 60) -> np.ndarray:
    """Keys and values of the text's last rows, after some steps."""
    shape = Shape(2, 512, 48, 16)
    state = new_state(pair.models, shape)
    admit = jax.jit(partial(prefill, pair.models, (shape.chunk,)))
    for slot, prompt in enumerate(prompts(2, seed=6, low=70, high=150)):
        request = make_request(shape, prompt, Decoding(max_new_tokens=250), 7, jax.random.key(0))
        state = admit(pair.params, state, jnp.int32(slot), request)
    assert [c.k.shape[1] for c in state.drafter_cache] == sizes
    step = jax.jit(partial(speculative_step, pair.models))
    for _ in range(rounds):
        state = step(pair.params, state)
    out = []
    for layer in state.drafter_cache:
        for b, length in enumerate(state.sequences.length):
            last = np.arange(length - 20, length - 1)
            out += [np.asarray(x[b, last % x.shape[1]]) for x in layer]
    return np.stack(out)


def test_the_last_rows_are_those_of_a_cache_with_all_positions(monkeypatch):
    """After prompts longer than a ring, in chunks longer than it, and steps twice around it."""
    pair = random_pair(sights=(dict(window=20, causal=True), dict(window=30)))
    monkeypatch.setattr(cache, "RING_BLOCK", 1)
    shapes._made_state.clear_cache()
    small = drafted(pair, [27, 37])
    monkeypatch.setattr(cache, "RING_BLOCK", 512)
    shapes._made_state.clear_cache()
    whole = drafted(pair, [512, 512])
    shapes._made_state.clear_cache()
    np.testing.assert_allclose(small, whole, rtol=1e-4, atol=1e-5)


def test_a_ring_has_room_for_the_window_and_a_block():
    assert ring_slots(2048, 16, 40960) == 2112
    assert ring_slots(49, 16, 512) == 64 and ring_slots(50, 16, 512) == 128
    assert ring_slots(2048, 16, 512) == 512
    caches = [
        empty_cache(m, 1, 512, 16, "float32")
        for m in drafter_config(sights=(dict(window=100), {})).mixers
    ]
    assert [c.wraps for c in caches] == [True, False]
    assert [c.k.shape[1] for c in caches] == [128, 512]


def test_a_prompt_leaves_its_last_rows_in_a_ring():
    """Chunks longer and shorter than the ring, the last one padded."""
    size, length = 24, 90
    rows = np.random.default_rng(0).normal(size=(1, 200, 2, 4)).astype(np.float32)
    for chunk in (7, 24, 50, 100):
        ring = RingCache(*(jnp.full((3, size, 2, 4), 9.0) for _ in range(2)))
        for offset in range(0, length, chunk):
            part = jnp.asarray(rows[:, offset : offset + chunk])
            ring = write_context(
                ring, part, -part, jnp.int32(1), jnp.int32(offset), jnp.int32(length)
            )
        last = np.arange(length - size, length)
        np.testing.assert_array_equal(ring.k[1, last % size], rows[0, last])
        np.testing.assert_array_equal(ring.v[1, last % size], -rows[0, last])
        assert (ring.k[::2] == 9).all()


def test_the_lossless_check_compares_what_a_ring_holds():
    """Random and replayed drafts, taken up to whole blocks at a time: the oracle's bits."""
    sights = (dict(window=20, causal=True), dict(window=9))
    pair = random_pair(sights=sights)
    other = random_params(drafter_config(sights=sights), 2)
    case = small_case()._replace(
        models=pair.models, other_drafter=Params(pair.params.target, other)
    )  # fmt: skip
    plan = lossless_check.Plan(tokens=90, replays=2, seed=0, dtype="float32", width_1=False)
    found, _ = lossless_check.check_batch(case, 2, plan, lambda count: None)
    assert found["first_difference"] is None
    assert sum(found["replay_histogram"][3:]) >= 5
    assert found["modes"]["replay"]["tokens"] >= 180
