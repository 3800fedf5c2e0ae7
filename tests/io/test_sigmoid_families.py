"""MiniMax-M2 and GLM-4: published sizes, layers that are not read, refusals.

The checkpoints are those that tests/reference recorded.
"""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash.io.hf_config import target_config
from jflash.io.hf_write import to_hf_config
from jflash.io.load import load_target
from jflash.layers.routes import route_by_sigmoid
from jflash.models.params import abstract_params
from tests.io.test_published_targets import UNSEEN

CASES = Path(__file__).parents[1] / "reference" / "cases"
MINIMAX, GLM, DENSE = (CASES / pair / "target" for pair in ("pair11", "pair10", "pair12"))
LONG = {"rope_type": "longrope", "rope_theta": 1e4}


def test_published_sizes():
    """Half of each head turns, and `rotary_dim` says it too. Parameters of those with experts are
    counted in tests/io/test_published_targets.py."""
    minimax, glm = (target_config(UNSEEN[name][0]) for name in ("minimax-m2", "glm-4.6"))
    for config in (minimax, glm):
        rope = config.mixers[0].rope
        assert rope and rope.rotary_dim == 64
    dense = target_config(
        {"architectures": ["Glm4ForCausalLM"]}
    )  # 9B, whose sizes are the defaults
    entries = sum(x.size for x in jax.tree.leaves(abstract_params(dense)))
    assert entries / 1e9 == pytest.approx(9.40, abs=0.01)
    assert glm.sparse_layers == tuple(range(3, 92))
    for config in (dense, minimax):
        with pytest.raises(ValueError, match="only models of Qwen3's shape"):
            to_hf_config(config, "bfloat16")


def test_groups_limit_the_choice_and_the_correction_changes_no_weight():
    """By hand: experts 0-1, 2-3, 4-5 are groups, of which the best by two experts are kept."""
    moe = target_config(json.loads((GLM / "config.json").read_text())).experts[0]
    moe = type(moe)(**vars(moe) | {"num_experts": 6, "groups": 3, "kept_groups": 1, "scale": 2.0})
    scores = jnp.asarray([[0.9, 0.1, 0.5, 0.6, 0.3, 0.2]])
    logits = jnp.log(scores / (1 - scores))
    weights, ids = route_by_sigmoid(logits, jnp.zeros(6), moe)
    assert ids.tolist() == [[3, 2]]  # not 0, whose group adds up to less
    np.testing.assert_allclose(weights, [[2 * 0.6 / 1.1, 2 * 0.5 / 1.1]], rtol=1e-5)
    lifted = jnp.asarray([0, 0, 0, 0, 1, 0.5])
    weights, ids = route_by_sigmoid(logits, lifted, moe)
    assert ids.tolist() == [[4, 5]]
    np.testing.assert_allclose(weights, [[2 * 0.3 / 0.5, 2 * 0.2 / 0.5]], rtol=1e-5)


def test_layers_that_predict_more_tokens_are_not_read(tmp_path):
    folder = shutil.copytree(GLM, tmp_path / "target")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {
        name.replace("layers.1.", "layers.2."): x for name, x in tensors.items() if "s.1." in name
    }
    save_file(tensors | {"model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32)}, file)
    for got, want in zip(*(jax.tree.leaves(load_target(x)[1]) for x in (folder, GLM)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("source", "changes", "named"),
    [
        *(
            (source, {"rope_parameters": LONG}, "rope_type 'longrope' is not supported, only")
            for source in (GLM, MINIMAX, DENSE)
        ),
        (GLM, {"n_group": 3}, "n_group 3, topk_group 2: 8 experts need equal groups"),
        (GLM, {"topk_group": 5}, "n_group 4, topk_group 5"),
        (GLM, {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
        (GLM, {"n_routed_experts": 12}, "num_experts is 12, the tensors are those of 8"),
        (GLM, {"first_k_dense_replace": 0}, "missing: model.layers.0.mlp.experts.0"),
        (GLM, {"num_hidden_layers": 3}, "num_hidden_layers is 3, the tensors are those of 2"),
        (GLM, {"use_qk_norm": False}, "unknown: model.layers.0.self_attn.k_norm.weight"),
        (MINIMAX, {"num_local_experts": 7}, "num_experts is 7, the tensors are those of 6"),
        (MINIMAX, {"rotary_dim": 0}, "rotary_dim must be a whole number"),
        (MINIMAX, {"quantization_config": {"quant_method": "quark"}}, "(quark): not supported"),
        (MINIMAX, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only"),
        (GLM, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only"),
        (GLM, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only None or"),
    ],
)
def test_what_does_not_fit_is_refused(source, changes, named, tmp_path):
    folder = shutil.copytree(source, tmp_path / "target")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match=re.escape(named)):
        load_target(folder, "float32")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (MINIMAX, "model.layers.1.block_sparse_moe.experts.5.w2.weight"),
        (MINIMAX, "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        (MINIMAX, "model.layers.1.self_attn.k_norm.weight"),
        (DENSE, "model.layers.1.mlp.gate_up_proj.weight"),
        (DENSE, "model.layers.0.post_mlp_layernorm.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(source, name, tmp_path):
    """Also where another expert of that layer, or another norm, is there."""
    folder = shutil.copytree(source, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"missing: {name}")):
        load_target(folder, "float32")
