"""What a request changes in the logits: as plain decoding at width 1 would have it, bit for bit."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.decoding import Sampling
from jflash.generate import Pair
from jflash.serving.engine import Engine
from jflash.serving.request import Request
from jflash.shaping import Shaping, logprobs, shaped
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import one_arithmetic, prompts, random_pair, replay_pair

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {5: 1.5, 9: -100.0, 42: -2.0}},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.4},
    "presence": {"presence_penalty": 0.9},
    "minimum": {"min_tokens": 20},
}
PAIRS = [("bias", "minimum"), ("repetition", "frequency"), ("presence", "minimum")]
PROMPT = prompts(1, seed=8, low=30, high=31)[0]
ALL_KNOWN = Request(
    prompt_ids=PROMPT, max_tokens=40, seed=1, logprobs=True, repetition_penalty=1.3,
    frequency_penalty=0.4,
)  # fmt: skip
DRAWN = Sampling(temperature=0.8, top_p=0.9)


@pytest.fixture(scope="module")
def engines():
    """The pair at width 8, plain decoding, and width 4 with a drafter that knows one text: that
    which plain decoding gives for `ALL_KNOWN`."""
    pair = one_arithmetic(random_pair())
    pair = Pair(replace(pair.models, draft_rule="greedy"), pair.params)
    how: dict[str, Any] = dict(max_batch=4, max_context=192, prefill_chunk=64, steps_per_call=2)
    with Engine(pair, **how) as wide, Engine(pair.plain(), **how) as plain:
        text = [*PROMPT, *plain.generate([ALL_KNOWN])[0].token_ids]
        knows = replay_pair(pair, text)
        narrow = replace(knows.models, block_size=4)
        with Engine(Pair(narrow, knows.params), **how) as narrow:
            yield [wide, narrow, plain]


def test_each_and_in_pairs_at_every_width(engines):
    ways = [OPTIONS[name] for name in OPTIONS] + [OPTIONS[a] | OPTIONS[b] for a, b in PAIRS]
    base = Request(prompt_ids=PROMPT, max_tokens=40, seed=1, logprobs=True)
    free = engines[2].generate([base])[0]
    stops = [free.token_ids[4]]  # what the minimum is for
    ways = [way | ({"stop_ids": stops} if "min_tokens" in way else {}) for way in [{}, *ways]]
    requests = [
        replace(base, sampling=sampling, **way)
        for way in ways
        for sampling in (base.sampling, DRAWN)
    ]
    wide, narrow, plain = (engine.generate(requests) for engine in engines)
    for request, one, other, want in zip(requests, wide, narrow, plain, strict=True):
        assert one.token_ids == other.token_ids == want.token_ids, request
        assert one.logprobs == other.logprobs == want.logprobs, request
        assert want.logprobs is not None and len(want.logprobs) == len(want.token_ids)
        if request.min_tokens:
            assert len(want.token_ids) >= 20
    greedy = [result.token_ids for result in plain[: 2 * len(OPTIONS) + 1 : 2]]
    assert len(set(map(tuple, greedy))) == len(greedy)  # every option says something
    assert requests.count(ALL_KNOWN) == 1
    # 1 + 9 · 4 + 3: a draft is judged by what comes after the drafts before it.
    assert narrow[requests.index(ALL_KNOWN)].acceptance_lengths == [4] * 9 + [3]


def test_the_rows_of_a_block_see_the_drafts_before_them():
    """Against the definition, on a block of one sequence."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 6)), jnp.float32)
    text, drafts = [4, 1, 1, 2], [1, 3]
    shaping = Shaping(*map(jnp.asarray, ([[0, -1]], [[0.5, 9.0]], [2.0], [0.3], [0.2], [1], [6])))
    tokens = jnp.asarray([[*text, 5, 5]], jnp.int32)
    stops = jnp.asarray([[5, -1]], jnp.int32)
    one = shaping._replace(ids=shaping.ids.astype(jnp.int32))
    got = shaped(logits, one, tokens, jnp.asarray([4]), jnp.asarray([drafts]), stops)[0]
    for row in range(3):
        before = text + drafts[:row]
        for token in range(6):
            x = float(logits[0, row, token]) + (0.5 if token == 0 else 0.0)
            if token in before:
                x = x / 2 if x > 0 else x * 2
            count = before[1:].count(token)
            x -= 0.3 * count + 0.2 * (count > 0)
            if token == 5 and len(before) < 6:
                x = -np.inf
            np.testing.assert_allclose(got[row, token], x, rtol=1e-6)


def test_logprobs_are_log_softmax():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 67)) * 4, jnp.float32)
    chosen = jnp.asarray([[0, 66, 5], [1, 2, 3]])
    want = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs(logits, chosen), want, rtol=1e-5)


def test_refusals(engines):
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"min_tokens": 257}, "min_tokens 257"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias inf"),
        ({"logit_bias": {67: 1.0}, "max_tokens": 9}, "logit_bias of token 67"),
    ]
    for how, why in wrong:
        with pytest.raises(ValueError, match=why):
            engines[0].submit(Request(prompt_ids=[1], **how))


def test_a_salt_keeps_prefixes_apart(engines):
    request = Request(prompt_ids=prompts(1, seed=3, low=130, high=131)[0], max_tokens=2)
    cached = [
        engines[0].generate([replace(request, cache_salt=salt)])[0].cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert cached == [0, 0, 128]
