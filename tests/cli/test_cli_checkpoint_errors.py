"""Checkpoints that generate.py cannot decode with: one line on stderr, exit code 2."""

import json
import os
from pathlib import Path

import pytest

from tests.support.refusals import decode
from tests.support.small_checkpoints import Folders, edit_config, make_pair


@pytest.fixture
def pair(tmp_path) -> Folders:
    return make_pair(tmp_path)


def test_missing_folder(pair, refused):
    refused(decode(Folders(pair.target / "nowhere", pair.drafter)), "nowhere", "no such folder")
    refused(decode(Folders(pair.target, pair.drafter / "nowhere")), "nowhere", "no such folder")


def test_a_hub_id_without_a_network(pair, refused, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    named = ("nobody/no-such-model", "hub cannot be reached", "give its folder")
    refused(decode(Folders(Path("nobody/no-such-model"), pair.drafter)), *named)


def test_empty_folder(pair, refused, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(decode(Folders(tmp_path / "empty", pair.drafter)), "empty folder")


def test_a_file_instead_of_a_folder(pair, refused):
    refused(decode(Folders(pair.target / "config.json", pair.drafter)), "config.json is a file")


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_no_config(pair, refused, which):
    (getattr(pair, which) / "config.json").unlink()
    refused(decode(pair), which, "has no config.json")


def test_config_that_is_no_json(pair, refused):
    (pair.target / "config.json").write_text('{"architectures": [')
    refused(decode(pair), "config.json is not valid JSON")
    (pair.target / "config.json").write_text("[1]")
    refused(decode(pair), "expected a JSON object")


@pytest.mark.parametrize(
    "name", ["DeepseekV3ForCausalLM", "FalconForCausalLM", "Qwen2VLForConditionalGeneration"]
)
def test_unsupported_architecture(pair, refused, name):
    edit_config(pair.target, architectures=[name])
    refused(decode(pair), name, "supported: Qwen3ForCausalLM")


def test_target_and_drafter_exchanged(pair, refused):
    refused(decode(Folders(pair.drafter, pair.target)), "DFlashDraftModel", "--drafter")
    refused(decode(Folders(pair.target, pair.target)), "unsupported drafter Qwen3ForCausalLM")


def test_a_drafter_of_an_unknown_version(pair, refused):
    edit_config(pair.drafter, architectures=["DFlash3DraftModel"])
    refused(decode(pair), "DFlash3DraftModel")


FEATURES = [
    ("target", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
    ("drafter", {"layer_types": ["sliding_attention"]}, "sliding_window"),
    ("target", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    ("target", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
    ("target", {"quantization_config": {"quant_method": "exl2"}}, "quantization_config (exl2)"),
    ("target", {"hidden_act": "gelu"}, "gelu"),
    ("target", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("target", {"hidden_size": "32"}, "hidden_size must be a whole number"),
    ("target", {"num_attention_heads": 0}, "num_attention_heads"),
    ("target", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
]


@pytest.mark.parametrize(("which", "change", "named"), FEATURES)
def test_unsupported_feature(pair, refused, which, change, named):
    edit_config(getattr(pair, which), **change)
    refused(decode(pair), named)


@pytest.mark.parametrize("size", [0, 7, 200, -100])
def test_truncated_safetensors(pair, refused, size):
    file = pair.target / "model.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    refused(decode(pair), "model.safetensors", "corrupt or truncated")


def test_corrupt_safetensors(pair, refused):
    (pair.drafter / "model.safetensors").write_bytes(b"\xff" * 4096)
    refused(decode(pair), "model.safetensors", "corrupt or truncated")


def test_no_weights(pair, refused):
    (pair.drafter / "model.safetensors").unlink()
    refused(decode(pair), str(pair.drafter), "holds no safetensors", "save_pretrained")


MISFITS = [
    ({"hidden_size": 64}, "hidden_size is 64 in the drafter, 32 in the target"),
    (
        {"num_target_layers": 5},
        "num_target_layers is 5 in the drafter, 2 in the target",
    ),
    ({"vocab_size": 301}, "vocab_size is 301 in the drafter, 300 in the target"),
    ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [0, 2]}}, "[0, 2]"),
    ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [-1, 1]}}, "[-1, 1]"),
    ({"dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 1]}}, "mask_token_id 300"),
    ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1]}}, "fc.weight"),
    ({"dflash_config": {"target_layer_ids": [0, 1]}}, "lacks mask_token_id"),
    ({"num_target_layers": None}, "lacks num_target_layers"),
    ({"block_size": 1}, "block_size must be at least 2, got 1"),
]


@pytest.mark.parametrize(("change", "named"), MISFITS)
def test_drafter_that_does_not_fit(pair, refused, change, named):
    edit_config(pair.drafter, **change)
    refused(decode(pair), named)


def test_a_variant_of_drafters_that_is_not_computed(pair, refused):
    own = {"mask_token_id": 299, "target_layer_ids": [0, 1], "projector_type": "domino"}
    edit_config(pair.drafter, dflash_config=own)
    refused(decode(pair), str(pair.drafter), "projector_type 'domino' in dflash_config")
    edit_config(pair.drafter, dflash_config=own | {"projector_type": "dflash"})
    (pair.drafter / "mask_embedding.pt").write_bytes(b"row")
    refused(decode(pair), "mask_embedding.pt: a drafter's own mask embedding is not supported")


def test_all_misfits_are_listed_together(pair, refused):
    edit_config(pair.drafter, hidden_size=64, vocab_size=301, num_target_layers=5)
    refused(decode(pair), "hidden_size is 64", "vocab_size is 301", "num_target_layers is 5")


def test_no_tokenizer_for_a_text(pair, refused):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (pair.target / file).unlink()
    refused(decode(pair), "holds no tokenizer", "--prompt-ids")
    refused(decode(pair, "--prompt-ids", "1", "--stop", "x", prompt=None), "holds no tokenizer")


def test_broken_tokenizer_and_no_template(pair, refused):
    edited = pair.target / "tokenizer_config.json"
    whole = json.loads(edited.read_text())
    edited.write_text(json.dumps({k: v for k, v in whole.items() if k != "chat_template"}))
    refused(decode(pair), "no chat template", "--no-chat-template")
    for template, error in {
        "{{ raise_exception('no ' + messages[0].role) }}": "no system",
        "{% if": "unexpected",
    }.items():
        edited.write_text(json.dumps(whole | {"chat_template": template}))
        refused(decode(pair, "--system", "be brief"), f"the chat template refuses: {error}")
    (pair.target / "tokenizer.json").write_text('{"version":')
    refused(decode(pair), "tokenizer", "does not load")
