"""config.json and tensors of Gemma 3 and 4: what is read, what is refused before a weight is read.

The checkpoints are those that tests/reference recorded; published configs are written by hand.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jflash import generate, load_pair
from jflash.bench.shapes import model_shape
from jflash.io.families import gemma3, gemma4
from jflash.io.hf_config import target_config
from jflash.io.load import load_target
from jflash.memory import weight_bytes
from jflash.records.specs import LinearScaling, ProportionalScaling

CASES = Path(__file__).parents[1] / "reference" / "cases"
GEMMA3 = CASES / "pair09"
# gemma-3-4b, in the form of its published file, whose keys for RoPE are the older ones.
TEXT = {
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
    "model_type": "gemma3_text", "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
SEEING = {"architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 262144}


def test_defaults_are_those_of_transformers():
    theirs = transformers.Gemma3TextConfig()
    for key, value in gemma3.DEFAULTS.items():
        name = "_sliding_window_pattern" if key == "sliding_window_pattern" else key
        assert getattr(theirs, name) == value, key
    config = target_config({"architectures": ["Gemma3ForCausalLM"]})
    kinds = [gemma3.LAYER_TYPES[window is None] for window in config.windows]
    assert kinds == theirs.layer_types
    for mixer, kind in zip(config.mixers, kinds, strict=True):
        assert mixer.rope and mixer.rope.theta == theirs.rope_parameters[kind]["rope_theta"]


def test_a_published_vision_model():
    config = target_config(SEEING | {"text_config": TEXT, "vision_config": {}})
    assert (config.num_layers, config.vocab_size, config.mixers[0].head_dim) == (34, 262208, 256)
    assert config.tie_embeddings and config.unread_ids == (262144,)
    assert config.windows == tuple(None if i % 6 == 5 else 1024 for i in range(34))
    local, full = config.mixers[0].rope, config.mixers[5].rope
    assert local and full and (local.theta, local.scaling) == (1e4, None)
    assert (full.theta, full.scaling) == (1e6, LinearScaling(factor=8.0))
    assert config.mixers[0].scale == 1 / 16 and config.embedding_scale == 2560**0.5


@pytest.mark.parametrize("kind", gemma3.LAYER_TYPES)
def test_layers_of_one_kind_as_transformers_writes_them(kind):
    """5.15.0 adds a RoPE type and a null theta beside the entries of both kinds."""
    raw = {"architectures": ["Gemma3ForCausalLM"], "layer_types": [kind] * 26}
    ropes = {gemma3.WINDOWED: {"rope_theta": 2e4}, gemma3.FULL: {"rope_theta": 3e6}}
    want = target_config(raw | {"rope_parameters": ropes})
    assert {mixer.rope and mixer.rope.theta for mixer in want.mixers} == {ropes[kind]["rope_theta"]}
    written = ropes | {"rope_type": "default", "rope_theta": None}
    assert target_config(raw | {"rope_parameters": written}) == want
    one = target_config(raw | {"rope_parameters": dict.fromkeys(ropes) | {kind: ropes[kind]}})
    assert one == want  # it reads a file that names the other kind as null
    with pytest.raises(ValueError, match=r"an object for each of .*, got 'rope_theta'$"):
        target_config(raw | {"rope_parameters": ropes | {"rope_theta": 5e5}})


def rewritten(folder: Path, changes: dict) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_model_that_sees_has_the_same_text_tower(prefix, tmp_path):
    """Both prefixes of vision models, and tensors of no use, of more layers: the same bits."""
    text = json.loads((GEMMA3 / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(SEEING | {"text_config": text}))
    tensors = load_file(GEMMA3 / "target" / "model.safetensors")
    moved = {name.replace("model.", prefix): x for name, x in tensors.items()}
    moved["model.vision_tower.head.weight"] = np.zeros(4, np.float32)
    for lead in ("", "model."):
        moved[f"{lead}vision_tower.encoder.layers.26.mlp.fc1.bias"] = np.zeros(4, np.float32)
    save_file(moved, tmp_path / "model.safetensors")
    got, want = load_target(tmp_path, "float32")[1], load_target(GEMMA3 / "target", "float32")[1]
    jax.tree.map(np.testing.assert_array_equal, got, want)
    fewer = {"num_hidden_layers": 3, "layer_types": text["layer_types"][:3]}
    rewritten(tmp_path, {"text_config": text | fewer})
    with pytest.raises(ValueError, match=r"num_hidden_layers is 3, the tensors are those of 4$"):
        load_target(tmp_path, "float32")


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("pair09", "image_token_index"),
        ("pair13", "image_token_id"),
        ("pair14", "video_token_id"),
    ],
)
def test_an_image_in_a_prompt_is_refused(case, key, tmp_path):
    folder = shutil.copytree(CASES / case / "target", tmp_path / "target")
    pair = load_pair(rewritten(folder, {key: 7}))
    with pytest.raises(ValueError, match="token id 7 stands for an image or a video"):
        generate(pair, [[3, 7]], max_new_tokens=2)


# gemma-4-26B-A4B by its stated sizes, and the shape of gemma-4-12B's file; neither could be opened.
FOUR = {
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
    "attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
EXPERTS["moe_intermediate_size"] = 704


def test_gemma_4_and_its_kinds():
    name = {"architectures": ["Gemma4ForConditionalGeneration"], "image_token_id": 258880}
    config = target_config(name | {"text_config": FOUR | EXPERTS})
    window, full = config.mixers[0], config.mixers[5]
    assert (window.num_kv_heads, window.head_dim, window.window) == (8, 256, 1024)
    assert (full.num_kv_heads, full.head_dim, full.window, full.shared_kv) == (2, 512, None, True)
    assert full.rope and full.rope.scaling == ProportionalScaling(turning=64, factor=1.0)
    assert config.layers[0].beside and config.layers[0].beside.num_experts == 128
    assert config.unread_ids == (258880, 258884, 258881) and config.windows[-1] is None
    given = {"per_layer_config": {f"{i:02}": {"head_dim": 512, "num_key_value_heads": 2}
                                  for i in range(5, 30, 6)}}  # fmt: skip
    assert target_config(name | {"text_config": FOUR | EXPERTS | given}) == config
    unified = {"architectures": ["Gemma4UnifiedForConditionalGeneration"]}
    text = {"model_type": "gemma4_unified_text"}
    theirs = transformers.Gemma4UnifiedTextConfig()
    config = target_config(unified | {"text_config": text})
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.windows[0] == theirs.sliding_window and config.num_layers == 30


def test_gemma_4s_experts_may_have_tensors_of_their_own(tmp_path):
    """As quantised files have them, whose formats know matrices alone."""
    whole = load_target(CASES / "pair14" / "target", "float32")[1]
    folder = shutil.copytree(CASES / "pair14" / "target", tmp_path / "target")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        module, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for e, expert in enumerate(tensors.pop(name)):
            rows = dict(zip(parts, np.split(expert, len(parts)), strict=True))
            tensors |= {f"{module}.{e}.{part}.weight": rows[part].copy() for part in parts}
    save_file(tensors, file)
    jax.tree.map(np.testing.assert_array_equal, whole, load_target(folder, "float32")[1])
    del tensors["model.layers.0.experts.1.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.experts\.1\.up_proj"):
        load_target(folder, "float32")


def test_gemma_4s_defaults_are_those_of_transformers():
    theirs = transformers.Gemma4TextConfig()
    theirs.allow_global_per_layer_attribute_access = True
    for key, value in gemma4.DEFAULTS.items():
        assert getattr(theirs, key) == value, key
    assert theirs.rope_parameters[gemma3.FULL] == gemma4.ROPES[gemma3.FULL]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 is not supported"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers 1 is not supported, only 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_scaling .* is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "beside rope_parameters, whose full_attention has 0.25"),
        ({"num_experts": 7}, "wrong shape: model.layers.0.router.proj.weight"),
        ({"top_k_experts": None}, "enable_moe_block needs top_k_experts"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config must give the layers"),
        ({"per_layer_config": {"3": [8]}}, "per_layer_config must give the layers"),
        ({"attention_k_eq_v": False}, "missing: model.layers.0.self_attn.v_proj.weight"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "'longrope' is not"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "x"}}}, "rope_type 'x' is not"),
        ({"rope_parameters": {"rope_type": "default"}}, "an object for each of sliding_attention"),
    ],
)
def test_what_gemma_4_cannot_be_is_refused(changes, named, tmp_path):
    folder = shutil.copytree(CASES / "pair14" / "target", tmp_path / "target")
    with pytest.raises(ValueError, match=named):
        load_target(rewritten(folder, changes), "float32")


ROPE = "rope_parameters"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({ROPE: {"full_attention": {"rope_type": "longrope"}}}, "rope_type 'longrope' is not"),
        ({ROPE: {"rope_type": "default"}}, "an object for each of sliding_attention and full"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling beside rope_para"),
        ({"quantization_config": 5}, "quantization_config must be an object, got 5"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported, only 'gelu"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 4 of sliding_attention or"),
        ({"sliding_window": 0}, "sliding_window must be a whole number from 1"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping must be above 0, got -1"),
        ({"num_hidden_layers": 2, "layer_types": None}, "num_hidden_layers is 2, the tensors are"),
        ({"head_dim": 32}, "wrong shape: model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_what_does_not_fit_is_refused(changes, named, tmp_path):
    folder = shutil.copytree(GEMMA3 / "target", tmp_path / "target")
    with pytest.raises(ValueError, match=named):
        load_target(rewritten(folder, changes), "float32")


def test_the_scale_of_a_drafters_embeddings(tmp_path):
    """The drafter's own if its file says it, 1 too; else the target's."""
    folder = shutil.copytree(GEMMA3 / "drafter", tmp_path / "drafter")
    raw = json.loads((folder / "config.json").read_text())
    for key, value in {"own": 1.0, "none": None}.items():
        raw["dflash_config"]["input_embedding_scale"] = value
        (folder / "config.json").write_text(json.dumps(raw))
        drafter = load_pair(GEMMA3 / "target", folder).models.drafter
        want = value or raw["hidden_size"] ** 0.5
        assert drafter and drafter.config.input_embedding_scale == want, key


TWELVE = {
    "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
THIRTY_ONE = {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
}  # fmt: skip


def test_the_shapes_to_time_are_these_models():
    """By the sizes that are stated of them; the number of a shape's weights tells a wrong one."""
    for shape, kind, raw in (
        ("gemma-3-12b", "Gemma3ForCausalLM", TWELVE),
        ("gemma-4-31b", "Gemma4ForCausalLM", FOUR | THIRTY_ONE),
        ("gemma-4-26b-a4b", "Gemma4ForCausalLM", FOUR | EXPERTS),
    ):
        target, drafter = model_shape(shape)
        assert target_config({"architectures": [kind]} | raw) == target
        assert drafter.hidden_size == target.hidden_size
    assert abs(weight_bytes([model_shape("gemma-4-26b-a4b").target]) / 4e9 - 25.2) < 0.05
