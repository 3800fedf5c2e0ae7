"""Weights that stay quantised in memory have the bits of those that are dequantised when read."""

import jax
import numpy as np
import pytest

from jflash import generate, load_pair
from jflash.bench.floors import verify_work
from jflash.io import configure_pair, load_weights
from jflash.memory import memory_budget
from jflash.models.params import abstract_params
from jflash.programs import Shape
from pallas_kernels.matmul.quantised import Quantised, dequantised
from tests.support.quantised_files import CASES, quantise
from tests.support.small_checkpoints import make_pair

KEPT = [name for name in CASES if "int8" not in name and name != "gptq-act-order"]


@pytest.mark.parametrize("case", KEPT)
def test_a_kept_leaf_stands_for_the_dequantised_one(tmp_path, case):
    """In codes of one byte or four bits, fused as the array is; the declared leaves are true."""
    target = make_pair(tmp_path).target
    quantise(target, CASES[case])
    kept = load_pair(target, dtype="bfloat16", quantised="kept")
    whole = load_pair(target, dtype="bfloat16")
    config = kept.models.target.config
    leaves = jax.tree_util.tree_flatten_with_path(
        kept.params.target, is_leaf=lambda x: isinstance(x, Quantised)
    )[0]
    expected = jax.tree_util.tree_flatten_with_path(whole.params.target)[0]
    count = 0
    for (path, leaf), (_, array) in zip(leaves, expected, strict=True):
        if isinstance(leaf, Quantised):
            count += 1
            leaf = dequantised(leaf, "bfloat16")
        np.testing.assert_array_equal(leaf, array, err_msg=str(path))
    assert count == 8
    declared = jax.tree.map(lambda leaf: leaf.struct, abstract_params(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), kept.params.target) == jax.tree.map(
        lambda x: (x.shape, x.dtype), declared
    )


def test_text_is_the_same_and_memory_smaller(tmp_path):
    folders = make_pair(tmp_path)
    quantise(folders.target, CASES["fp8-block"])
    pairs = {
        how: load_pair(folders.target, dtype="bfloat16", quantised=how)
        for how in ("kept", "dequantised")
    }
    texts = {
        how: [r.token_ids for r in generate(pair, [[5, 6, 7], [9, 2]], max_new_tokens=16)]
        for how, pair in pairs.items()
    }
    assert texts["kept"] == texts["dequantised"]
    configs = {how: pair.models.target.config for how, pair in pairs.items()}
    held = {
        how: sum(x.nbytes for x in jax.tree.leaves(pair.params.target))
        for how, pair in pairs.items()
    }
    shape = Shape.of(1, 256)
    budgets = {how: memory_budget(pair.models, shape).weights for how, pair in pairs.items()}
    assert budgets == held and held["kept"] < held["dequantised"]
    read = {how: verify_work(c, 1, 1, 8.0).weight_bytes for how, c in configs.items()}
    assert read["dequantised"] - read["kept"] == held["dequantised"] - held["kept"]


def test_a_request_to_keep_what_cannot_be_kept_is_refused(tmp_path):
    target = make_pair(tmp_path).target
    with pytest.raises(ValueError, match="has no quantised weights that may be kept"):
        configure_pair(target, quantised="kept")
    quantise(target, CASES["gptq-act-order"])
    with pytest.raises(ValueError, match="has no quantised weights that may be kept"):
        configure_pair(target, quantised="kept")
    with pytest.raises(ValueError, match="quantised 'yes' is not one of auto, kept, dequantised"):
        configure_pair(target, quantised="yes")
    assert load_weights(configure_pair(target)).models.target.config.layers[0].kept == ()
