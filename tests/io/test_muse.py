"""config.json and tensors of Muse-Glimmer: what is read, what is refused before a weight is read.

The checkpoint is the one that tests/reference recorded; the published config is transformers'.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jflash import generate, load_pair
from jflash.bench.shapes import model_shape
from jflash.io.families import muse_glimmer
from jflash.io.hf_config import target_config
from jflash.io.load import load_target
from jflash.memory import weight_bytes

TARGET = Path(__file__).parents[1] / "reference" / "cases" / "pair15" / "target"
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
