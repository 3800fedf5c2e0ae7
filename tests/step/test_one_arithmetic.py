"""The law end to end, on a CPU: tokens, logits, keys and values are those of plain decoding.

Plain decoding at width 1 and batch 1 is the reference; every other width, batch, capacity, chunk,
slot, neighbour and driver must give its bits. Operations alone: tests/kernels.
"""

from dataclasses import replace

import jax
import pytest

from jflash.generate import Pair, generate, stream
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding, Sampling
from jflash.records.specs import MoeSpec
from jflash.serving.batch import Job, serve
from tests.conftest import jax_options
from tests.support.attention_checks import ON_GPU
from tests.support.digested import NEW, texts, total
from tests.support.pairs import (
    HYBRID,
    SANDWICH,
    drafter_config,
    one_arithmetic,
    prompts,
    random_params,
    target_config,
)

pytestmark = pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")
WIDTH = 16
MOE = MoeSpec(
    num_experts=12,
    experts_per_token=3,
    intermediate_size=24,
    renormalise=True,
)


def pair_of(dtype: str = "float32", **target) -> Pair:
    configs = target_config(**target), drafter_config(block_size=WIDTH, num_layers=1)
    configs = [replace(config, dtype=dtype) for config in configs]
    params = [random_params(config, seed) for seed, config in enumerate(configs)]
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    models = Models(Target(configs[0]), Drafter(configs[1]), WIDTH)
    return one_arithmetic(Pair(models, Params(*params)))


def narrow(pair: Pair, width: int) -> Pair:
    return replace(pair, models=replace(pair.models, block_size=width))


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(4, seed=31, low=20, high=140)


BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": False}
BY_SIGMOID = replace(
    MOE, scores="sigmoid", groups=4, kept_groups=2, scale=2.5, shared_size=20, shared_gated=False
)
CLAMPED = replace(MOE, scores="softmax of the chosen", clamped=True, bias=True)
# Between them: every operation of a target, a layer of plain attention and MLP in both dtypes.
HYBRIDS = "hybrid, shared expert"
KINDS = {
    HYBRIDS: {"moe": replace(MOE, shared_size=20), "sparse": (0,), **HYBRID},
    "sinks, windows, clamped experts, bfloat16": {
        "dtype": "bfloat16", "moe": CLAMPED, "sparse": (0,), **BIASES, "mlp_bias": False,
        "sinks": True, "norm_dtype": "float32", "sights": ({"window": 20}, {}),
    },
    "own heads, experts beside, a gate, normed embeddings": {"tie_embeddings": True, **SANDWICH},
    "biases, experts by sigmoids": {
        "moe": BY_SIGMOID, "sparse": (1,), "tie_embeddings": True, **BIASES, "qk_norm": True,
        "norm_all_heads": True,
    },
}  # fmt: skip
# As users have their programs: bits may hang on what is fused with what. So has tests/kernels every
# operation alone, a test below a dense pair, and a long test of test_check_lossless the embedded
# pair.
FULLY = [pytest.param(kind, True, (WIDTH, 5), marks=pytest.mark.long) for kind in list(KINDS)[:2]]
SOON = [(kind, False, ((5,), (WIDTH,))[number % 2]) for number, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "fully", "widths"), [*SOON, *FULLY])
def test_width_batch_capacity_and_chunk_change_no_bit(kind, fully, widths, asked):
    """Slots change, and drafts are the text with mistakes, so that some of each are accepted."""
    pair = pair_of(**KINDS[kind])
    with jax_options(jax_disable_most_optimizations=not fully):
        want = texts(pair.plain(), 1, asked)
        for width in widths:
            how = {"capacity": 512, "chunk": 64, "replay": want[::-1]}
            found = texts(narrow(pair, width), 4, asked[::-1], **how)[::-1]
            assert not total(want, found).differ


def test_one_operation_by_xla_is_caught(asked):
    """Its products; more faults: tests/proof/test_law.py and, by operation, tests/kernels."""
    pair = pair_of()
    kernels = pair.models.kernels._replace(matmul="xla")
    pair = replace(pair, models=replace(pair.models, kernels=kernels))
    want = texts(pair.plain(), 1, asked[:2], new=4)
    assert total(want, texts(pair, 2, asked[:2], capacity=512, new=4)).differ


@pytest.mark.parametrize(
    ("kind", "fully"),
    [pytest.param(kind, True, marks=pytest.mark.long) for kind in ("attention", HYBRIDS)],
)
def test_what_is_generated_is_what_a_prompt_would_be(kind, fully, asked):
    """Half of a text by steps or all of it by chunks: the same keys, values and later logits.

    As users have their programs, so that the law holds in what the compiler makes of all of them.
    Of a hybrid, as tests have them: test_hybrid.
    """
    pair = pair_of(**KINDS.get(kind, {}))
    with jax_options(jax_disable_most_optimizations=not fully):
        want = texts(pair, 4, asked)
        longer = [d.tokens[: d.prompt_tokens + NEW // 2].tolist() for d in want]
        found = texts(pair.plain(), 1, longer, chunk=64, new=NEW - NEW // 2)
    assert not total(want, found).differ


def test_every_driver_gives_plain_decodings_text(asked):
    """Greedy text and sampled text, under draft rule greedy: generate, stream and the engine."""
    pair = pair_of()
    pair = replace(pair, models=replace(pair.models, draft_rule="greedy"))
    ways = [Sampling(), Sampling(temperature=1.0, top_p=0.9)] * 2
    how = [Decoding(max_new_tokens=NEW, sampling=way, seed=5) for way in ways]
    jobs = [Job(i, prompt, way) for i, (prompt, way) in enumerate(zip(asked, how, strict=True))]
    # All in one program: which of them are greedy is a run-time value.
    sampled = replace(pair, models=replace(pair.models, sampled=True))
    want = [
        generate(sampled.plain(), [job.prompt_ids], job.decoding, first_index=job.index)[0]
        for job in jobs
    ]
    distinct = [len(set(text.token_ids)) for text in want]
    assert min(distinct) > 1 and max(distinct[1::2]) > 5, distinct  # greedy texts may loop
    found = generate(pair, asked, how, prefill_chunk=64, capacity=512)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]
    chunks = list(stream(sampled, asked[0], how[0]))
    assert [t for chunk in chunks for t in chunk.token_ids] == want[0].token_ids
    for job, answer in serve(pair, jobs[::-1], batch_size=3):
        assert answer.token_ids == want[job.index].token_ids
