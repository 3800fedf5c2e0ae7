"""Muse-Glimmer and its assistant: what is read, what is refused before a weight is read.

The checkpoint is the one that tests/reference recorded; the published config is transformers'.
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
from jflash.io import convert_checkpoint, load_drafter
from jflash.io.families import muse_glimmer
from jflash.io.hf_config import drafter_config, target_config
from jflash.io.load import load_target
from jflash.memory import weight_bytes

TESTS = Path(__file__).parents[1]
PAIR = TESTS / "reference" / "cases" / "pair15"
TARGET = PAIR / "target"
ASSISTANT = json.loads((TESTS / "golden" / "muse_assistant.json").read_text())
NAME = {"architectures": [muse_glimmer.ARCHITECTURE]}
PUBLISHED = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


def test_defaults_are_those_of_transformers():
    theirs, seeing = transformers.MuseGlimmerTextConfig(), transformers.MuseGlimmerConfig()
    for key, value in muse_glimmer.DEFAULTS.items():
        assert getattr(theirs, key) == value, key
    for key, value in muse_glimmer.UNREAD.items():
        assert getattr(seeing, key) == value, key
    config = target_config(NAME | {"text_config": {}})
    whole = [kind == "full_attention" for kind in theirs.layer_types]
    assert [window is None for window in config.windows] == whole
    thetas = [mixer.rope.theta if mixer.rope else 0 for mixer in config.mixers]
    assert thetas == theirs.layer_rope_theta


def test_the_shape_to_time_is_this_model():
    """By transformers' defaults and the stated theta.

    59.6 GB in bfloat16 are stated with the vision tower, whose layers have 1.85e9 numbers.
    """
    target = model_shape("muse-glimmer-30b").target
    assert target_config(NAME | {"text_config": PUBLISHED}) == target
    vision = 50 * (4 * 1536**2 + 2 * 1536 * 8960)
    assert weight_bytes([target]) / 4 + vision == pytest.approx(59.6e9 / 2, rel=5e-3)


def rewritten(folder: Path, changes: dict) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= changes.pop("text", {})
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


def test_only_the_layers_norms_lack_their_one():
    names = {"norm/scale": "norm", "layers_0/mlp_norm/scale": "layers.0.post_feedforward_layernorm"}
    stored = load_file(TARGET / "model.safetensors")
    params = load_target(TARGET, "bfloat16")[1]
    for leaf, tensor in names.items():
        got = params
        for part in leaf.split("/"):
            got = got[part]
        want = stored[f"model.language_model.{tensor}.weight"].astype(np.float32)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want + (leaf != "norm/scale"))


def test_an_image_in_a_prompt_is_refused(tmp_path):
    folder = shutil.copytree(TARGET, tmp_path / "target")
    pair = load_pair(rewritten(folder, {"image_token_id": 7}))
    with pytest.raises(ValueError, match="token id 7 stands for an image or a video"):
        generate(pair, [[3, 7]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"layer_rope_theta": [10.0, 0]}, "layer_rope_theta must be 2 of 0 and rope_theta"),
        ({"layer_rope_theta": [0]}, "layer_rope_theta must be 2 of 0 and rope_theta"),
        ({"layer_rope_theta": "0"}, "layer_rope_theta must be a list of numbers, got '0'"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 2 of sliding_attention or"),
        ({"sliding_window": 0}, "sliding_window must be a whole number from 1"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias True is not supported, only False"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be above 0, got 0"),
        ({"output_multiplier": -1.5}, "output_multiplier must be above 0, got -1.5"),
        ({"post_norm_eps": 0}, "post_norm_eps must be a number above 0, got 0"),
        ({"num_key_value_heads": 4}, "wrong shape: model.layers.0.self_attn.k_proj.weight"),
        ({"num_hidden_layers": 1, "layer_types": None, "layer_rope_theta": None},
         "num_hidden_layers is 1, the tensors are"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(text, named, tmp_path):
    folder = shutil.copytree(TARGET, tmp_path / "target")
    with pytest.raises(ValueError, match=named):
        load_target(rewritten(folder, {"text": text}), "float32")


def test_a_missing_gate_is_named(tmp_path):
    folder = shutil.copytree(TARGET, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.language_model.layers.1.self_attn.gate_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*layers\.1\.self_attn\.gate_proj\.weight"):
        load_target(folder, "float32")


def assistant(folder: Path, **changes) -> Path:
    """The recorded drafter as an assistant; such a file says no vocabulary, and these have few."""
    folder.mkdir()
    raw = ASSISTANT["config"] | {"vocab_size": 163} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(PAIR / "drafter" / "model.safetensors")
    renamed = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    for old, new in renamed.items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_an_assistant_is_converted(tmp_path):
    source = assistant(tmp_path / "assistant")
    convert_checkpoint(source, tmp_path / "converted")
    drafter, params = load_drafter(tmp_path / "converted", "float32")
    want, whole = load_drafter(source, "float32")
    assert drafter == want
    jax.tree.map(np.testing.assert_array_equal, params, whole)


def test_an_assistant_drafts_as_in_transformers(tmp_path):
    """Every token and every length of its own assisted generation; the window's edge is in it."""
    pair = load_pair(TARGET, assistant(tmp_path / "assistant"), dtype="float32")
    for case in ASSISTANT["cases"]:
        got = generate(
            pair, [case["prompt_ids"]], max_new_tokens=len(case["output_ids"]), capacity=512,
            prefill_chunk=32,
        )[0]  # fmt: skip
        assert got.token_ids == case["output_ids"]
        assert got.acceptance_lengths == case["acceptance_lengths"]
    assert {n for case in ASSISTANT["cases"] for n in case["acceptance_lengths"]} > {1, 2, 4}


def test_a_published_assistant():
    theirs = transformers.MuseGlimmerAssistantConfig(architectures=["MuseGlimmerAssistantModel"])
    config = drafter_config(theirs.to_dict())
    assert drafter_config({"architectures": theirs.architectures}) == config
    assert {(m.window, m.causal) for m in config.mixers} == {(theirs.sliding_window + 1, False)}
    assert (config.block_size, config.mask_token_id) == (theirs.block_size, theirs.mask_token_id)
    assert list(config.target_layer_ids) == theirs.target_layer_ids
    assert config.mixers[0].rope and config.mixers[0].rope.theta == theirs.default_theta
    shape = model_shape("muse-glimmer-30b").drafter
    sizes = ("hidden_size", "intermediate_size", "num_layers", "rms_norm_eps", "vocab_size")
    assert [getattr(config, x) for x in sizes] == [getattr(shape, x) for x in sizes]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size is 202048 in the drafter, 163 in the target"),
        ({"sliding_window": 0}, "sliding_window must be a whole number from 1"),
        ({"target_layer_ids": [1, 2]}, "it taps layer 2 .counted from 0. of a target of 2"),
        ({"layer_types": ["chunked_attention"]}, "layer_types must be 2 of full_attention or"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
    ],
)
def test_what_an_assistant_cannot_be_is_refused(changes, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        load_pair(TARGET, assistant(tmp_path / "assistant", **changes))


def test_an_assistant_is_no_target(tmp_path):
    with pytest.raises(ValueError, match="a drafter: give it as --drafter"):
        load_pair(assistant(tmp_path / "assistant"))
