"""DFlash drafters in GGUF: the same parameters, config and text as of the same drafter's folder.

Files are written as llama.cpp's converter names keys and tensors, of the drafter in `checkpoints/`.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from jflash import generate, load_pair
from jflash.cli.main import run
from jflash.io import (
    configure_pair,
    convert_checkpoint,
    load_drafter,
    open_checkpoint,
    save_checkpoint,
)
from jflash.io.hf_config import drafter_config
from jflash.records.config import DrafterConfig, second_version
from tests.support.gguf_files import finished, put
from tests.support.small_checkpoints import DRAFTER, make_pair, unit_gain_params

pytestmark = pytest.mark.usefixtures("compiled_once")
PAIR = Path(__file__).parents[2] / "checkpoints" / "tiny-math"
FOLDER = PAIR / "drafter"
SECOND = second_version(
    DRAFTER, conv_kernel_size=3, conv_group_size=4, selector_rank=6, selector_top_k=5
)
Kind = GGMLQuantizationType
KINDS = (Kind.F16, Kind.BF16, Kind.Q8_0)
NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}  # fmt: skip
NAMES = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in NAMES.items()} | {
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
WINDOWS: dict[str, Any] = {"dflash.attention.sliding_window": 24}
WINDOWS |= {"dflash.attention.sliding_window_pattern": [True, False]}


def stored_name(name: str) -> str:
    if not name.startswith("layers."):
        return NAMES[name]
    _, i, module = name.split(".", 2)
    return f"blk.{i}.{NAMES[module]}"


def metadata(**changes: Any) -> dict[str, Any]:
    """What the converter writes of the drafter; taps are counted from the embedding."""
    own = {
        "block_count": 2, "embedding_length": 256, "feed_forward_length": 640,
        "context_length": 2048, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 64, "attention.value_length": 64, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6, "block_size": 16,
        "target_layers": [1, 3, 5, 7, 8],
    }  # fmt: skip
    tokenizer = {"model": "gpt2", "pre": "another", "tokens": [f"t{i}" for i in range(4096)]}
    tokenizer["mask_token_id"] = 3
    return (
        {"general.type": "model"}
        | {f"dflash.{key}": value for key, value in own.items()}
        | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
        | changes
    )


def write(
    path: Path, kind: Kind, changes: dict, data: dict[str, np.ndarray | None], folder: Path = FOLDER
) -> Path:
    """The drafter as GGUF: matrices of a kind, vectors in float32, as the converter writes them."""
    writer = GGUFWriter(path, "dflash")
    for key, value in metadata(**changes).items():
        put(writer, key, value)
    stored = {stored_name(k): v for k, v in load_file(folder / "model.safetensors").items()}
    for name, value in (stored | data).items():
        if value is not None:
            plain = value.ndim != 2
            numbers = np.asarray(value, np.float32)
            rows = numbers if plain else quantize(numbers, kind)
            writer.add_tensor(name, rows, raw_dtype=Kind.F32 if plain else kind)
    return finished(writer, path)


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "drafter.gguf", Kind.BF16, {}, {})


def twin(folder: Path, kind: Kind) -> Path:
    """The folder of the same numbers, dequantised by the gguf library."""
    shutil.copytree(FOLDER, folder)
    tensors = load_file(FOLDER / "model.safetensors")
    wide = {name: np.asarray(x, np.float32) for name, x in tensors.items()}
    made = {k: dequantize(quantize(x, kind), kind) if x.ndim > 1 else x for k, x in wide.items()}
    changed = [name for name, x in made.items() if (x != wide[name]).any()]
    assert bool(changed) == (kind != Kind.BF16)  # the drafter's own type
    save_file(made, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_same_parameters_to_the_bit(kind, tmp_path):
    theirs, want = load_drafter(twin(tmp_path / "twin", kind), "float32")
    ours, got = load_drafter(write(tmp_path / "drafter.gguf", kind, {}, {}), "float32")
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert ours.config.layers == theirs.config.layers
    assert ours.config.target_layer_ids == theirs.config.target_layer_ids == (0, 2, 4, 6, 7)
    for name in ("vocab_size", "hidden_size", "block_size", "mask_token_id", "dtype"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert ours.config.rms_norm_eps == pytest.approx(1e-6) and ours.config.num_target_layers is None
    assert ours.config.input_embedding_scale is None  # its target's, as of the folder


def test_the_same_text_in_the_same_steps(file):
    """And of the Orbax form that it is converted to."""
    converted = file.with_name("orbax")
    convert_checkpoint(file, converted)
    runs = []
    for drafter in (FOLDER, file, converted):
        pair = load_pair(PAIR / "target", drafter, dtype="float32")
        [made] = generate(pair, [list(range(40, 60))], max_new_tokens=24)
        runs.append((made.token_ids, made.acceptance_lengths))
    assert runs[0] == runs[1] == runs[2] and max(runs[0][1]) > 1


def test_version_2(tmp_path):
    """Its convolutions and its selector; and the text is that of its folder."""
    folders = make_pair(tmp_path)
    save_checkpoint(folders.drafter, SECOND, unit_gain_params(SECOND, 7), "float32")
    theirs, want = load_drafter(folders.drafter)
    mixer = DRAFTER.mixers[0]
    sizes = {
        "block_count": 1, "embedding_length": 32, "feed_forward_length": 48, "context_length": 240,
        "attention.head_count": mixer.num_heads, "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": 16, "attention.value_length": 16, "block_size": 4,
        "target_layers": [1, 2], "attention.causal": False, "embedding_scale": 1.0,
        "conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5,
    }  # fmt: skip
    changes = {f"dflash.{key}": value for key, value in sizes.items()} | {
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(300)], "tokenizer.ggml.mask_token_id": 299,
    }  # fmt: skip
    file = write(tmp_path / "second.gguf", Kind.F32, changes, {}, folders.drafter)
    ours, got = load_drafter(file)
    rounded = pytest.approx(theirs.config.rms_norm_eps)
    assert ours.config.rms_norm_eps == rounded and ours.config.num_target_layers is None
    known = dict(rms_norm_eps=theirs.config.rms_norm_eps, num_target_layers=2)
    assert replace(ours.config, **known) == theirs.config
    jax.tree.map(np.testing.assert_array_equal, got, want)
    runs = [
        generate(load_pair(folders.target, drafter), [[5, 6, 7]], max_new_tokens=12)[0]
        for drafter in (folders.drafter, file)
    ]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].acceptance_lengths == runs[1].acceptance_lengths


def test_what_a_pair_learnt_from_it_is_saved_as_a_folder(file, tmp_path):
    """With the number of the target's layers, which its own file does not say."""
    drafter = load_pair(PAIR / "target", file, dtype="float32").models.drafter
    assert drafter and drafter.config.num_target_layers == 8
    params = load_drafter(file, "float32")[1]
    save_checkpoint(tmp_path / "learnt", drafter.config, params, "float32")
    again, got = load_drafter(tmp_path / "learnt", "float32")
    assert again.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, got, params)


def config(file: Path) -> DrafterConfig:
    return open_checkpoint(file).config(drafter_config)


def test_windows_causality_and_scales_are_the_folders(tmp_path):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    cases: list[tuple[dict, dict]] = [
        ({"dflash.attention.causal": c}, {"is_causal": c}) for c in (True, False)
    ]
    cases += [(WINDOWS | a, layers | {"sliding_window": 24} | b) for a, b in cases]
    cases.append(({"dflash.logit_scale": 0.5}, {"output_multiplier": 0.5}))
    cases.append(({"dflash.final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}))
    cases.append(({"dflash.embedding_scale": 2.0}, {"input_embedding_scale": 2.0}))
    cases.append(({"dflash.rope.dimension_sections": [32, 0, 0, 0]}, {}))  # of M-RoPE's targets
    cases.append((WINDOWS | {"dflash.attention.sliding_window_pattern": [False, False]}, {}))
    for i, (ours, theirs) in enumerate(cases):
        got = config(write(tmp_path / f"{i}.gguf", Kind.BF16, ours, {}))
        raw = json.loads((FOLDER / "config.json").read_text())
        want = drafter_config(raw | theirs)
        assert got.layers == want.layers, ours
        for name in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
            assert getattr(got, name) == getattr(want, name), ours


TABLE = np.zeros((4096, 256), np.float32)
BAD: dict[str, tuple[dict, dict, str]] = {
    "missing": ({}, {"blk.1.attn_v.weight": None}, "missing: blk.1.attn_v.weight"),
    "no fc": ({}, {"fc.weight": None}, "missing: fc.weight"),
    "sinks": ({}, {"blk.0.attn_sinks.weight": np.ones(4)}, "unknown: blk.0.attn_sinks.weight"),
    "early names": ({}, {"hidden_norm.weight": np.ones(256)}, "unknown: hidden_norm.weight"),
    "shape": ({}, {"enc.output_norm.weight": np.ones(9)}, "enc.output_norm.weight is (9,), expec"),
    "fewer layers": ({"dflash.block_count": 3}, {}, "block_count is 3, the tensors are those of 2"),
    "taps": ({"dflash.target_layers": None}, {}, "the metadata lacks dflash.target_layers"),
    "early taps": ({"dflash.target_layer_ids": [1]}, {}, "dflash.target_layer_ids ([1])"),
    "embedding tapped": ({"dflash.target_layers": [0, 1, 2, 3, 4]}, {}, "must be within 0"),
    "too deep": ({"dflash.target_layers": [1, 2, 3, 4, 9]}, {}, "it taps layer 8 (counted from 0)"),
    "fewer taps": ({"dflash.target_layers": [1, 2]}, {}, "is (256, 1280), expected (256, 512)"),
    "block": ({"dflash.block_size": None}, {}, "the metadata lacks dflash.block_size"),
    "mask": ({"tokenizer.ggml.mask_token_id": None}, {}, "lacks tokenizer.ggml.mask_token_id"),
    "tokens": ({"tokenizer.ggml.tokens": None}, {}, "the metadata lacks tokenizer.ggml.tokens"),
    "no tokens": ({"tokenizer.ggml.tokens": 9}, {}, "ggml.tokens must be a list of names"),
    "anchor": ({"dflash.sample_from_anchor": True}, {}, "dflash.sample_from_anchor (True)"),
    "second": ({"dflash.selector_rank": 4}, {}, "lacks conv_kernel_size, conv_group_size,"),
    "embedding": ({}, {"token_embd.weight": TABLE}, "token_embd.weight: drafters that"),
    "head": ({}, {"output.weight": TABLE}, "output.weight: drafters that bring an embedding"),
    "d2t": ({}, {"d2t": np.ones(4)}, "d2t: drafters that bring an embedding or a head"),
    "yarn": ({"dflash.rope.scaling.type": "yarn"}, {}, "rope.scaling.type 'yarn' is not supported"),
    "sections": ({"dflash.rope.dimension_sections": [11, 11, 10, 0]}, {}, "must turn all 32 pairs"),
    "windows": (WINDOWS, {}, "does not say whether a row of a block sees those after it"),
    "pattern": (WINDOWS | {"dflash.attention.sliding_window_pattern": [True]}, {}, "have 2 values"),
    "no pattern": ({"dflash.attention.sliding_window": 24}, {}, "lacks dflash.attention.sliding"),
    "periods": (
        WINDOWS | {"dflash.attention.sliding_window_pattern": 2}, {}, "a list of true and false",
    ),
    "per layer": ({"dflash.attention.causal": [True, False]}, {}, "causal must be true or false"),
    "other hidden": ({"dflash.target_hidden_size": 512}, {}, "target_hidden_size 512 is not the"),
    "vocabulary": ({"dflash.vocab_size": 99}, {}, "vocab_size is 99 in the drafter, 4096 in the"),
    "width": ({"dflash.embedding_length": 128}, {}, "hidden_size is 128 in the drafter,"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_supported_is_one_line(case, tmp_path, capsys):
    changes, data, said = BAD[case]
    file = write(tmp_path / "bad.gguf", Kind.BF16, changes, data)
    options = ["--target", str(PAIR / "target"), "--drafter", str(file), "--prompt-ids", "1,2"]
    assert run("generate", options) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_each_in_its_place(file):
    """A drafter is no target, and a target is no drafter."""
    with pytest.raises(ValueError, match=r"DFlashDraftModel \(a drafter: give it as --drafter\)"):
        configure_pair(file)
    assert not open_checkpoint(file).companions().keys() - {"config.json"}
