"""Each family's bad input is refused by its name, before weights are read.

What is particular to a family is in the test of its config.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jflash.checks import check_request
from jflash.io import configure_pair
from jflash.io.hf_config import TARGETS, target_config
from jflash.records.decoding import Decoding
from tests.support.reference import record

CASES = sorted((Path(__file__).parents[1] / "reference" / "cases").glob("pair*"))
FAMILY = {folder: record(folder)["family"] for folder in CASES}
SEES = {  # families whose config may name ids of images
    "qwen3_5": "image_token_id", "gemma3_text": "image_token_index",
    "gemma4_text": "image_token_id", "muse_glimmer": "image_token_id",
}  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    """A target with another config beside the same weights; of a model that sees, the text's."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    raw = json.loads((source / "config.json").read_text())
    own = {name: x for name, x in changes.items() if not name.endswith(("index", "n_id", "config"))}
    text = {"text_config": raw["text_config"] | own} if "text_config" in raw else own
    raw |= text | {name: x for name, x in changes.items() if name not in own}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def refused(target: Path, drafter: Path | None = None) -> str:
    """Why the command would end before it reads a weight."""
    with pytest.raises(ValueError) as error:
        files = configure_pair(target, drafter, dtype="float32")
        files.target.check(files.models.target.config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_family_is_here():
    assert set(FAMILY.values()) == set(TARGETS.values())


@pytest.mark.parametrize("case", CASES, ids=[f"{FAMILY[x]}-{x.name}" for x in CASES])
def test_bad_input_is_refused_by_its_name(case, tmp_path):
    source, family = case / "target", FAMILY[case]
    long = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    ropes = dict.fromkeys(("full_attention", "sliding_attention"), long)
    ropes = ropes if family.startswith("gemma") else long
    rope = edited(source, tmp_path / "rope", rope_parameters=ropes, rope_scaling=None)
    assert "'longrope' is not supported" in refused(rope)
    codes = edited(source, tmp_path / "codes", quantization_config={"quant_method": "exl2"})
    assert "exl2" in refused(codes)
    sees_later = edited(source, tmp_path / "causal", is_causal=False)
    assert "is_causal false: tokens of such a model attend to later ones" in refused(sees_later)
    other = CASES[CASES.index(case) - 1] / "drafter"
    assert "the drafter does not fit the target: " in refused(source, other)
    raw = json.loads((source / "config.json").read_text())
    for name in [name for name in EXPERTS if raw.get(name)]:
        wrong = edited(source, tmp_path / "experts", **{name: raw[name] + 1})
        assert "experts" in refused(wrong)
    missing = edited(source, tmp_path / "missing")
    tensors = {file: load_file(file) for file in missing.glob("*.safetensors")}
    own = [(name, file) for file, names in tensors.items() for name in names]
    lost, file = max(one for one in own if ".layers." in one[0] and "vision" not in one[0])
    del tensors[file][lost]
    file.unlink()
    save_file(tensors[file], file)
    assert f"missing: {lost.replace('.language_model', '')}" in refused(missing)


@pytest.mark.parametrize("family", SEES)
def test_an_image_in_a_prompt_is_refused(family, tmp_path):
    [case, *_] = [folder for folder, name in FAMILY.items() if name == family]
    target = edited(case / "target", tmp_path / "target", **{SEES[family]: 7})
    models = configure_pair(target, dtype="float32").models
    with pytest.raises(ValueError, match="token id 7 stands for an image or a video"):
        check_request(models, [1, 7], Decoding(max_new_tokens=1))


SEEING = {  # classes of models that see, their configs in transformers, and kinds of tokens
    "Qwen3_5ForConditionalGeneration": (transformers.Qwen3_5Config, ("image", "video")),
    "Qwen3_5MoeForConditionalGeneration": (transformers.Qwen3_5MoeConfig, ("image", "video")),
    "Gemma3ForConditionalGeneration": (transformers.Gemma3Config, ("image",)),
    "Gemma4ForConditionalGeneration": (transformers.Gemma4Config, ("image", "video", "audio")),
    "Gemma4UnifiedForConditionalGeneration": (
        transformers.Gemma4UnifiedConfig, ("image", "video", "audio"),
    ),
    "MuseGlimmerForConditionalGeneration": (transformers.MuseGlimmerConfig, ("image", "video")),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEING)
def test_ids_that_a_config_leaves_out_are_transformers(name):
    """Of a model that sees, and of no text model; an id that the config names takes its place."""
    theirs, kinds = SEEING[name]
    keys = [f"{kind}_token_id" for kind in kinds]
    usual = tuple(getattr(theirs(), key) for key in keys)
    raw = {"architectures": [name], "text_config": {"hidden_size_per_layer_input": 0}}
    assert target_config(raw).unread_ids == usual
    assert target_config(raw | dict.fromkeys(keys)).unread_ids == usual
    assert target_config(raw | {keys[0]: 7}).unread_ids == (7, *usual[1:])
    inner = {"text_config": raw["text_config"] | {keys[0]: 8}}
    assert target_config(raw | inner).unread_ids == (8, *usual[1:])
    text = name.replace("ForConditionalGeneration", "ForCausalLM")
    if text in TARGETS:
        assert target_config({"architectures": [text]} | raw["text_config"]).unread_ids == ()
