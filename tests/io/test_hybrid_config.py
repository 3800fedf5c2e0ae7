"""config.json and tensors of Qwen3.5, Qwen3.5-MoE and Qwen3-Next: what is read, what is refused.

The checkpoints are those that tests/reference recorded; published configs are written by hand.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash import load_pair
from jflash.bench.shapes import model_shape
from jflash.io.convert import convert_checkpoint
from jflash.io.hf_config import target_config
from jflash.io.load import load_target
from jflash.records.specs import DeltaSpec

CASES = Path(__file__).parents[1] / "reference" / "cases"
DENSE, MOE, NEXT = (CASES / f"pair0{i}" for i in (5, 6, 7))
TEXT = {
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
    "vocab_size": 248320,
}  # fmt: skip


def seeing(name: str, **text) -> dict:
    raw = {"architectures": [name], "text_config": TEXT | text, "tie_word_embeddings": False}
    return raw | {"image_token_id": 248056, "video_token_id": 248057, "vision_config": {}}


def test_the_shapes_to_time_are_the_published_ones():
    """Sizes as stated for 27B and 35B-A3B; the files themselves could not be opened."""
    dense = seeing(
        "Qwen3_5ForConditionalGeneration", hidden_size=5120, intermediate_size=17408,
        num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        linear_num_value_heads=48,
    )  # fmt: skip
    moe = seeing("Qwen3_5MoeForConditionalGeneration", hidden_size=2048, num_hidden_layers=40)
    for raw, shape in ((dense, "qwen3.5-27b"), (moe, "qwen3.5-35b-a3b")):
        got, want = target_config(raw), model_shape(shape).target
        assert got.unread_ids == (248056, 248057)
        assert got.layers == want.layers and got.norm_shift == want.norm_shift == 1
        assert (got.vocab_size, got.hidden_size) == (want.vocab_size, want.hidden_size)
    kinds = [isinstance(x.mixer, DeltaSpec) for x in target_config(dense).layers]
    assert kinds == [True, True, True, False] * 16


def test_a_model_that_sees_has_the_same_text_tower(tmp_path):
    """Nested config and names, tensors of no use: the same config and the same bits."""
    raw = json.loads((DENSE / "target" / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": raw}
    whole["tie_word_embeddings"] = raw.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(whole | {"image_token_id": 3}))
    tensors = load_file(DENSE / "target" / "model.safetensors")
    moved = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    moved |= {"model.visual.blocks.0.norm1.weight": np.zeros(4, np.float32)}
    moved |= {"mtp.layers.0.mlp.gate_proj.weight": np.zeros((4, 4), np.float32)}
    save_file(moved, tmp_path / "model.safetensors")
    plain, want = load_target(DENSE / "target", "float32")
    model, got = load_target(tmp_path, "float32")
    assert model.config.layers == plain.config.layers and model.config.unread_ids == (3, 248057)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_table_is_of_one_family(tmp_path):
    """The same tensors under another family's architecture: its table has no such names."""
    for file in (DENSE / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    extra = {"norm_topk_prob": True, "num_experts": 0, "architectures": ["Qwen3NextForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | extra))
    with pytest.raises(ValueError) as error:
        load_target(tmp_path)
    assert "missing: model.layers.0.linear_attn.in_proj_qkvz.weight" in str(error.value)
    assert "unknown: model.layers.0.linear_attn.in_proj_z.weight" in str(error.value)


def test_our_own_form_keeps_what_is_float32(tmp_path):
    """Norms of 1 + w and decays, in a bfloat16 model."""
    convert_checkpoint(NEXT / "target", tmp_path / "own")
    for source in (NEXT / "target", tmp_path / "own"):
        _, params = load_target(source, "bfloat16")
        layer = params["layers_0"]
        kept = [layer["input_norm"]["scale"], layer["attention"]["a_log"], params["norm"]["scale"]]
        assert {x.dtype for x in kept} == {np.dtype("float32")}
        assert layer["attention"]["inputs"]["kernel"].dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(kept[0], 1 + _stored("input_layernorm.weight"))


def _stored(name: str) -> np.ndarray:
    tensors = load_file(NEXT / "target" / "model.safetensors")
    return tensors[f"model.layers.0.{name}"].astype(np.float32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "partial_rotary"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be 2 of"),
        ({"linear_num_value_heads": 3}, "is not a multiple of linear_num_key_heads 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be"),
        ({"num_experts": 7}, "num_experts is 7, the tensors are those of 6"),
        ({"quantization_config": {"quant_method": "exl2"}}, "exl2"),
        ({"linear_num_value_heads": 8}, "wrong shape: model.layers.0.linear_attn"),
        ({"layer_types": ["full_attention"] * 2}, "missing: model.layers.0.self_attn.q_proj"),
    ],
)
def test_what_does_not_fit_is_refused(changes, named, tmp_path):
    folder = shutil.copytree(MOE / "target", tmp_path / "target")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match=named):
        load_target(folder, "float32")


def test_a_drafter_of_another_family_is_refused():
    with pytest.raises(ValueError, match="does not fit the target: hidden_size is 32 in"):
        load_pair(MOE / "target", DENSE / "drafter")
