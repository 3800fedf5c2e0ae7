"""Weights that stay quantised in memory have the bits of those that are dequantised when read."""

import shutil
from pathlib import Path

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

NEXT = Path(__file__).parents[1] / "reference" / "cases" / "pair07"
KEPT = [name for name in CASES if "int8" not in name and name != "gptq-act-order"]


def same_numbers(kept: dict, whole: dict, dtype: str) -> int:
    """Compares parameters, bit for bit; the number of kept leaves."""
    leaves = jax.tree.flatten_with_path(kept, is_leaf=lambda x: isinstance(x, Quantised))[0]
    count = 0
    for (path, leaf), array in zip(leaves, jax.tree.leaves(whole), strict=True):
        if isinstance(leaf, Quantised):
            count += 1
            leaf = dequantised(leaf, dtype)
        np.testing.assert_array_equal(leaf, array, err_msg=str(path))
    return count


@pytest.mark.parametrize("case", KEPT)
def test_a_kept_leaf_stands_for_the_dequantised_one(tmp_path, case):
    """In codes of one byte or four bits, fused as the array is; the declared leaves are true."""
    target = make_pair(tmp_path).target
    quantise(target, CASES[case])
    kept = load_pair(target, dtype="bfloat16", quantised="kept")
    whole = load_pair(target, dtype="bfloat16")
    config = kept.models.target.config
    assert same_numbers(kept.params.target, whole.params.target, "bfloat16") == 8
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


def test_experts_and_gates_of_one_column_are_dequantised(tmp_path):
    """Their products read no codes; the shared expert's do."""
    target = tmp_path / "target"
    shutil.copytree(NEXT / "target", target)
    weights = quantise(target, CASES["fbgemm"], endings=("_proj.weight", "expert_gate.weight"))
    assert any(".experts.0." in name for name in weights)
    assert any("shared_expert_gate" in name for name in weights)
    pair = load_pair(target, dtype="float32", quantised="kept")
    layers = pair.models.target.config.layers
    kept = {leaf.rsplit("/", 1)[0] for leaf, _ in layers[0].kept}
    assert {"mlp/shared_gate_up", "mlp/shared_down"} <= kept
    assert not kept & {"mlp/gate_up", "mlp/down", "mlp/shared_gate"}
    # Columns of its attention lie in another order than the file's rows.
    assert any(leaf == "attention/qkv/kernel" for x in layers for leaf, _ in x.kept)
    whole = load_pair(target, dtype="float32")
    assert same_numbers(pair.params.target, whole.params.target, "float32")
