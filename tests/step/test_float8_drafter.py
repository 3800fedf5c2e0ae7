"""A drafter rounded to e4m3: another drafter to the step, and the same text."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.compiled.shape import Shape
from jflash.devices.kept import in_fragments
from jflash.devices.mesh import with_context, with_rounding
from jflash.draft_error import draft_error
from jflash.generate import Pair, generate
from jflash.io import configure_pair, load_pair
from jflash.memory import memory_budget, tree_bytes
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models, Params
from jflash.records.config import second_version
from jflash.records.decoding import Decoding, Sampling
from jflash.speculative import apply
from pallas_kernels.matmul.float8.rounded import Rounded, rounded_weight
from pallas_kernels.matmul.kept.fragments import Fragments, fragments
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised
from tests.support.pairs import (
    drafter_config,
    one_arithmetic,
    prompts,
    random_pair,
    random_params,
    target_config,
)


def made(kind: str) -> tuple[Pair, Pair]:
    """A pair, and the same with its drafter rounded, each as it decodes."""
    target = target_config(tie_embeddings=kind == "tied")
    drafter = drafter_config(num_layers=2, qkv_bias=True)
    if kind == "DFlash 2":
        drafter = second_version(drafter, selector_rank=8, selector_top_k=4)
    if kind == "its head":
        drafter = replace(drafter, draft_vocab_size=32)
    params = Params(random_params(target, 0), random_params(drafter, 1))
    if kind == "its head":
        params.drafter["d2t"] = jnp.arange(32, dtype=jnp.int32)  # it drafts even ids
    models = Models(Target(target), Drafter(drafter), drafter.block_size)
    other, params = models.drafting_in("float8"), with_context(models, params)
    return Pair(models, params), Pair(other, with_rounding(other, params))


KINDS = ("tied", "DFlash 2", "its head")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_counts_the_rounded_leaves_and_the_copy_of_the_head(kind: str):
    exact, other = made(kind)
    for pair in (exact, other):
        assert memory_budget(pair.models, Shape.of(1, 256)).weights == tree_bytes(pair.params)
    assert other.params.drafter["draft_head"].codes.dtype == jnp.float8_e4m3fn
    assert "head" not in other.params.drafter


def test_a_best_draft_is_as_sure_as_the_rounded_head_says():
    pair = made("tied")[1]
    drafter, params = pair.models.drafter, pair.params.drafter
    assert drafter is not None
    hidden = jax.random.normal(jax.random.key(3), (2, 5, drafter.config.hidden_size))
    best, sure = apply(drafter, params, hidden, "xla", method="best_and_confidence")
    probabilities = jax.nn.softmax(apply(drafter, params, hidden, "xla", method="raw_logits"))
    np.testing.assert_array_equal(best, jnp.argmax(probabilities, axis=-1))
    np.testing.assert_allclose(sure, jnp.max(probabilities, axis=-1), rtol=1e-5)


def test_for_few_rows_the_weights_lie_in_fragments_where_kernels_read_them():
    """Codes with a scale a column; the head, and a weight that no tile divides, do not."""
    wide = {"hidden_size": 128, "intermediate_size": 192, "num_layers": 1, "head_dim": 16}
    target, drafter = target_config(**wide), drafter_config(**wide, target_layer_ids=(0,))
    drafter = replace(drafter, num_target_layers=1)
    models = Models(Target(target), Drafter(drafter), drafter.block_size)
    params = with_context(models, Params(random_params(target, 0), random_params(drafter, 1)))
    canonical = replace(models, kernels=models.kernels._replace(matmul="canonical"))

    def rounded(models: Models, batch: int | None) -> tuple[Models, Any]:
        models = in_fragments(models.drafting_in("float8", batch))
        return models, with_rounding(models, params)

    few, made = rounded(canonical, 16 // drafter.block_size)
    assert memory_budget(few, Shape.of(1, 256)).weights == tree_bytes(made)
    _, arrays = rounded(canonical, 16 // drafter.block_size + 1)
    assert jax.tree.structure(arrays) == jax.tree.structure(rounded(canonical, None)[1])
    assert jax.tree.structure(arrays) == jax.tree.structure(rounded(models, 1)[1])
    others = {k: w for k, w in made.drafter.items() if k in params.drafter}
    pairs = jax.tree.leaves(
        jax.tree.map(
            lambda a, b: (a, b), others, {k: params.drafter[k] for k in others},
            is_leaf=lambda x: isinstance(x, Rounded | Fragments),
        ),
        is_leaf=lambda x: isinstance(x, tuple) and not isinstance(x, Rounded),
    )  # fmt: skip
    lie = [(a, b) for a, b in pairs if isinstance(a, Fragments)]
    assert len(lie) == 3 and sum(isinstance(a, Rounded) for a, _ in pairs) == 3
    for words, array in lie:
        codes, scales = rounded_weight(array, jnp.bfloat16)
        kernel = Quantised(codes.T, scales[None], None, len(array))
        np.testing.assert_array_equal(words.words, fragments(kernel).words)
        error = jnp.abs(dequantised(kernel, "float32") - array.astype("float32"))
        assert jnp.all(error <= jnp.max(jnp.abs(array), axis=0) / 16)


def test_its_logits_are_near_the_exact_ones_and_scales_decide():
    exact, other = made("its head")

    def error(params: Params) -> float:
        forms = exact.models, exact.params, other.models, params
        return draft_error(*forms, prompts(1, low=59)[0]).relative

    def without_scales(x: Any) -> Any:
        return x._replace(scales=jnp.ones_like(x.scales)) if isinstance(x, Rounded) else x

    assert 0.005 < error(other.params) < 0.1
    wrong = jax.tree.map(
        without_scales, other.params.drafter["layers_1"], is_leaf=lambda x: isinstance(x, Rounded)
    )
    assert error(other.params._replace(drafter=other.params.drafter | {"layers_1": wrong})) > 0.3


def test_greedy_text_is_that_of_the_exact_drafter():
    exact, other = (
        [
            result.token_ids
            for result in generate(one_arithmetic(pair), prompts(2), Decoding(max_new_tokens=32))
        ]
        for pair in made("tied")
    )
    assert exact == other


def test_sampled_text_under_rule_greedy_is_that_without_a_draft():
    _, pair = made("DFlash 2")
    pair = one_arithmetic(pair)
    pair = Pair(replace(pair.models, draft_rule="greedy", sampled=True), pair.params)
    decoding = Decoding(max_new_tokens=32, sampling=Sampling(temperature=1.0), seed=3)
    drafted, none = (
        generate(pair, prompts(2), replace(decoding, oracle=oracle)) for oracle in (False, True)
    )
    assert [result.token_ids for result in drafted] == [result.token_ids for result in none]
    assert sum(result.steps for result in drafted) < sum(result.steps for result in none)


def test_what_cannot_be_rounded_is_refused_by_name():
    models = random_pair().models
    with pytest.raises(ValueError, match="drafter_dtype 'float4' is not 'float8'"):
        models.drafting_in("float4")
    with pytest.raises(ValueError, match="drafter_dtype 'float8' without a drafter"):
        configure_pair("checkpoints/tiny-math/target", drafter_dtype="float8")
    with pytest.raises(ValueError, match="batch 0 must be at least 1"):
        load_pair("checkpoints/tiny-math/target", batch=0)
