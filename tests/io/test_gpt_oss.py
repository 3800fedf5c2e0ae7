"""gpt-oss: published configs, experts in MXFP4, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash import load_pair
from jflash.bench.shapes import model_shape
from jflash.compiled.shape import Shape, new_state
from jflash.io.hf_config import target_config
from jflash.io.load import load_target
from jflash.models.params import abstract_params
from tests.support.logits import target_logits

TESTS = Path(__file__).parents[1]
PACKED = TESTS / "golden" / "mxfp4" / "target"  # tests/reference/record_mxfp4.py
RECORDED = PACKED.with_name("recorded.safetensors")
PAIR = TESTS / "reference" / "cases" / "pair08"
PUBLISHED = {  # of 20b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "scaled"),
    [({}, True), ({"rope_parameters": None}, True), ({"rope_parameters": {}}, False)],
)
def test_empty_rope_parameters_are_a_plain_rope(given, scaled):
    """Those that are absent or null are the class's, as in transformers 5.15.0."""
    raw = {key: value for key, value in PUBLISHED.items() if key != "rope_scaling"} | given
    rope = target_config(raw).mixers[0].rope
    assert (rope.scaling is not None, rope.theta) == (scaled, 150000)


def test_the_shapes_to_time_are_the_published_ones():
    """120b's keys are transformers' defaults. 20.9 and 116.8 billion parameters were published."""
    small, large = PUBLISHED, {"architectures": ["GptOssForCausalLM"]}
    for raw, shape, entries in (
        (small, "gpt-oss-20b", 20_914_757_184),
        (large, "gpt-oss-120b", 116_829_156_672),
    ):
        got, want = target_config(raw), model_shape(shape).target
        assert got == want
        assert sum(x.size for x in jax.tree.leaves(abstract_params(want))) == entries


def test_mxfp4_is_transformers_bits():
    """Every code, and exponents far apart; gate and up are columns of one product each."""
    tensors, want = load_file(PACKED / "model.safetensors"), load_file(RECORDED)
    codes = tensors["model.layers.0.mlp.experts.down_proj_blocks"]
    assert {*np.unique(codes & 15)} == {*np.unique(codes >> 4)} == {*range(16)}
    _, params = load_target(PACKED, "bfloat16")
    mlp = params["layers_0"]["mlp"]
    turns = want["gate_up_proj"]
    columns = np.concatenate([turns[..., ::2], turns[..., 1::2]], axis=-1)
    np.testing.assert_array_equal(mlp["gate_up"]["kernel"], columns)
    np.testing.assert_array_equal(mlp["down"]["kernel"], want["down_proj"])


def test_logits_of_packed_experts_are_transformers():
    model, params = load_target(PACKED, "float32")
    want = load_file(RECORDED)
    got = target_logits(model, params, want["prompt_ids"].tolist())
    np.testing.assert_allclose(
        np.asarray(got).reshape(want["logits"].shape), want["logits"], atol=3e-4
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types must be 2 of"),
        ({"sliding_window": None}, "sliding_window must be a whole number"),
        ({"sliding_window": 2**40}, "sliding_window must be a whole number from 1 to 2147483647"),
        ({"quantization_config": {"quant_method": "quark"}}, r"\(quark\): not supported"),
        ({"num_local_experts": 5}, "wrong shape: model.layers.0.mlp.router.weight"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 must be within 1 … 4"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5 is not supported, only None or 1.702"),
        ({"swiglu_limit": 6.0}, "swiglu_limit 6.0 is not supported, only None or 7"),
        ({"intermediate_size": 40}, "columns in 32s, not 40"),
        ({"attention_bias": False}, "unknown: model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_what_does_not_fit_is_refused(changes, named, tmp_path):
    folder = shutil.copytree(PACKED, tmp_path / "target")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match=named):
        load_target(folder, "float32")


def test_codes_without_exponents_and_drafters_of_other_targets_are_refused(tmp_path):
    folder = shutil.copytree(PACKED, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="down_proj_scales"):
        load_target(folder, "float32")
    with pytest.raises(ValueError, match="does not fit the target: num_target_layers is 4 in"):
        load_pair(PACKED, PAIR / "drafter")


def test_rings_never_wrap_where_the_kernel_cuts_them_by_slots():
    """By the canonical attention a window is a mask over all positions; else the ring is short."""
    models = load_pair(PAIR / "target", PAIR / "drafter", dtype="float32").models
    shape = Shape.of(1, 1024, chunk=64)
    for name, slots in (("canonical", [1024] * 4), ("cpu", [128, 1024] * 2)):
        kernels = models.kernels._replace(attention=name)
        with_them = models.__class__(**{**vars(models), "kernels": kernels})
        state = jax.eval_shape(lambda m=with_them: new_state(m, shape))
        assert [cache.k.shape[1] for cache in state.target_cache] == slots
    assert jnp.dtype(models.dtype) == jnp.float32
