"""Hugging Face folders to configs and parameters: nothing guessed, strict both ways."""

import functools
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jflash.config import Llama3Scaling
from jflash.io import configure_pair, load_drafter, load_pair, load_target, read_ahead, weights
from jflash.io.hf_config import DEFAULT_ROPE_THETA, DEFAULTS, drafter_config, target_config
from jflash.io.load import load_params, read_config
from jflash.io.names import leaf_sources
from jflash.io.text import load_tokenizer, stop_token_ids
from tests.small_checkpoints import (
    DRAFTER,
    EOS,
    TARGET,
    Folders,
    edit_config,
    edit_tensors,
    make_pair,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pair(tmp_path) -> Folders:
    return make_pair(tmp_path)


def error_of(folder: Path, load=load_target) -> str:
    with pytest.raises(ValueError) as error:
        load(folder)
    return str(error.value)


# Tensors


def test_every_tensor_lands_in_its_leaf(pair):
    """Kernels are transposes, fused ones side by side; all else is as stored."""
    stored, params = load_file(pair.target / "model.safetensors"), load_target(pair.target)[1]
    layer = params["layers_1"]
    prefix = "model.layers.1."
    qkv = [stored[f"{prefix}self_attn.{x}_proj.weight"].T for x in "qkv"]
    np.testing.assert_array_equal(layer["attention"]["qkv"]["kernel"], np.concatenate(qkv, 1))
    gate_up = [stored[f"{prefix}mlp.{x}_proj.weight"].T for x in ("gate", "up")]
    np.testing.assert_array_equal(layer["mlp"]["gate_up"]["kernel"], np.concatenate(gate_up, 1))
    np.testing.assert_array_equal(params["embedding"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], stored["lm_head.weight"])
    stored, params = load_file(pair.drafter / "model.safetensors"), load_drafter(pair.drafter)[1]
    np.testing.assert_array_equal(params["fc"]["kernel"], stored["fc.weight"].T)
    qkv = [stored[f"layers.0.self_attn.{x}_proj.weight"].T for x in "qkv"]
    np.testing.assert_array_equal(
        params["layers_0"]["attention"]["qkv"]["kernel"], np.concatenate(qkv, 1)
    )


def test_all_that_does_not_fit_is_listed_in_one_error(pair):
    norm = "model.layers.0.input_layernorm.weight"
    edit_tensors(
        pair.target,
        drop=("model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
        **{"model.extra.weight": np.zeros(2, np.float32), norm: np.ones(31, np.float32)},
        **{"lm_head.weight": np.zeros((300, 32), np.int32)},
    )
    again = {"model.embed_tokens.weight": np.zeros((300, 32), np.float32)}
    save_file(again, pair.target / "more.safetensors")
    message = error_of(pair.target)
    for part in (
        str(pair.target),
        "missing: model.norm.weight",
        "missing: model.layers.1.mlp.up_proj.weight",
        "unknown: model.extra.weight",
        f"wrong shape: {norm} is (31,), expected (32,)",
        "given twice: model.embed_tokens.weight",
        "in model.safetensors",
        "in more.safetensors",
        "unsupported dtype: lm_head.weight is I32",
    ):
        assert part in message


def test_a_transposed_tensor_is_a_wrong_shape(pair):
    name = "model.layers.0.mlp.down_proj.weight"
    stored = load_file(pair.target / "model.safetensors")
    edit_tensors(pair.target, **{name: np.ascontiguousarray(stored[name].T)})
    assert f"wrong shape: {name} is (48, 32), expected (32, 48)" in error_of(pair.target)


def test_a_long_list_is_cut_and_counted(pair):
    edit_tensors(pair.target, **{f"extra.{i}": np.zeros(1, np.float32) for i in range(25)})
    assert "… and 5 more" in error_of(pair.target)


def shard(folder: Path, names_in_first: int = 5) -> None:
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    weight_map = {
        name: f"model-0000{1 + (i >= names_in_first)}-of-00002.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_load_as_the_whole_does(pair):
    whole = load_target(pair.target)[1]
    shard(pair.target)
    jax.tree.map(np.testing.assert_array_equal, whole, load_target(pair.target)[1])


def test_shards_that_are_missing_cut_or_not_indexed(pair):
    shard(pair.target)
    second = pair.target / "model-00002-of-00002.safetensors"
    os.truncate(second, second.stat().st_size - 10)
    assert f"{second} is corrupt or truncated" in error_of(pair.target)
    second.unlink()
    assert "files that are not there: model-00002" in error_of(pair.target)
    (pair.target / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in error_of(pair.target)


def test_both_checkpoints_are_checked_before_either_is_read(pair, monkeypatch):
    edit_tensors(pair.drafter, drop=("norm.weight",))
    read = []
    monkeypatch.setattr("jflash.io.read_ahead.read", lambda *args: read.append(args))
    with pytest.raises(ValueError, match=r"missing: norm\.weight"):
        load_pair(*pair)
    assert not read


def test_dropped_names_are_no_errors(pair):
    """Old files store RoPE tables; a tied model may store its head; re-exports prefix `model.`."""
    edit_tensors(pair.target, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")})
    load_target(pair.target)
    edit_config(pair.target, tie_word_embeddings=True)
    assert "head" not in load_target(pair.target)[1]
    stored = load_file(pair.drafter / "model.safetensors")
    want = load_drafter(pair.drafter)[1]
    renamed = {f"model.{name}": tensor for name, tensor in stored.items()}
    save_file(renamed, pair.drafter / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, want, load_drafter(pair.drafter)[1])
    save_file(renamed | stored, pair.drafter / "model.safetensors")
    assert "given twice: fc.weight (fc.weight in" in error_of(pair.drafter, load_drafter)


# Reading ahead


def extreme(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Every kind of float32, subnormal ones, both zeros and both infinities among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-44, 30, shape)
    special = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 65504.0, 3.4e38]
    flat = values.astype(np.float32).ravel()
    flat[: min(len(special), flat.size)] = special[: flat.size]
    return flat.reshape(shape)


@pytest.mark.parametrize("turning", [True, False])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
def test_pieces_make_the_same_bits(pair, monkeypatch, stored, turning):
    """However a tensor is cut, and whoever transposes it: what numpy makes of the whole file."""
    file = pair.drafter / "model.safetensors"
    with np.errstate(over="ignore"):
        tensors = {
            name: extreme(tensor.shape, i).astype(jnp.dtype(stored))
            for i, (name, tensor) in enumerate(load_file(file).items())
        }
    save_file(tensors, file)
    monkeypatch.setattr(read_ahead, "PIECE", 700)  # some rows of a tensor, less than one of others
    monkeypatch.setattr(read_ahead, "AHEAD", 5)
    monkeypatch.setattr("jflash.io.weights._device_turns", lambda: turning)
    for dtype in (None, "float32", "bfloat16"):
        want = jnp.dtype(dtype or (stored if stored != "float64" else "float32"))
        params = load_params(pair.drafter, DRAFTER, dtype)
        for leaf, parts in leaf_sources(DRAFTER).items():
            got = functools.reduce(lambda tree, key: tree[key], leaf.split("/"), params)
            whole = np.concatenate([tensors[part.name] for part in parts])
            whole = whole.T if leaf.endswith("/kernel") else whole
            with np.errstate(over="ignore"):
                whole = whole.astype(want)
            assert got.dtype == want and np.asarray(got).tobytes() == whole.tobytes(), leaf


def test_no_more_is_read_than_may_be_under_way(pair, monkeypatch):
    started = []
    honest = read_ahead.read

    def counted(piece):
        started.append(piece)
        return honest(piece)

    monkeypatch.setattr(read_ahead, "AHEAD", 4)
    monkeypatch.setattr(read_ahead, "read", counted)
    tensors = read_ahead.find_tensors(pair.target / "model.safetensors")
    pieces = list(tensors.values())
    assert len(pieces) > 9
    arrivals = read_ahead.read_ahead(pieces)
    for i in range(5):
        piece, rows = next(arrivals)
        assert piece == pieces[i] and rows.shape == piece.shape
        assert len(started) <= i + 4
    arrivals.close()
    assert len(started) <= 8  # what was not begun is not read


def test_no_weight_is_held_twice_beside_one_leaf(pair, monkeypatch):
    """All bytes on the device, each time that a leaf is put together: its parts and itself too."""
    held, before = [], 0
    honest = weights._join

    def counted(parts, *rest):
        leaf = jax.block_until_ready(honest(parts, *rest))
        held.append(sum(array.nbytes for array in jax.live_arrays()) - before)
        return leaf

    monkeypatch.setattr(weights, "_join", counted)
    monkeypatch.setattr(weights, "_device_turns", lambda: True)
    monkeypatch.setattr(read_ahead, "PIECE", 700)
    load_params(pair.target, TARGET, "float32")  # constants of its own are made
    held.clear()
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    params = load_params(pair.target, TARGET, "float32")
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # Embedding and head, the largest, come while the rest is missing: no more than a layer's leaf
    # comes on top of all the parameters.
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params["layers_0"]))
    assert len(held) > 8 and total < max(held) <= total + largest
    assert largest < params["embedding"].nbytes / 3


def test_a_file_that_shrinks_while_it_is_read(pair):
    file = pair.target / "model.safetensors"
    tensors = list(read_ahead.find_tensors(file).values())
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated at "):
        list(read_ahead.read_ahead(tensors))
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read at"):
        list(read_ahead.read_ahead(tensors))


def test_progress_counts_bytes(pair, capsys):
    load_target(pair.target, progress=True)
    size = sum(x.nbytes for x in load_file(pair.target / "model.safetensors").values())
    last = capsys.readouterr().err.rstrip().split("\r")[-1]
    assert "loading target: 100%" in last and f"{size / 1000:.0f}k/{size / 1000:.0f}k" in last


@pytest.mark.parametrize("change", [{"qkv_bias": True, "qk_norm": False}, {"mlp_bias": True}, {}])
def test_every_leaf_of_every_family_has_a_source(change):
    config = replace(TARGET, **change)
    names = [part.name for parts in leaf_sources(config).values() for part in parts]
    assert len(names) == len(set(names))
    assert any(name.endswith("q_proj.bias") for name in names) == bool(change.get("qkv_bias"))
    assert any("q_norm" in name for name in names) == change.get("qk_norm", True)


def test_dtype_on_request(pair):
    assert load_target(pair.target, "bfloat16")[1]["embedding"].dtype == "bfloat16"
    with pytest.raises(ValueError, match="float16"):
        load_target(pair.target, "float16")


def test_configuring_a_pair_reads_no_weights(pair):
    for folder in pair:
        (folder / "model.safetensors").unlink()
    files = configure_pair(*pair, block_size=3)
    assert (files.models.block_size, files.models.taps) == (3, (0, 1))


# Configs


def test_written_configs_are_read_back(pair):
    assert read_config(pair.target, target_config) == TARGET
    assert read_config(pair.drafter, drafter_config) == DRAFTER


CLASSES = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
}
NAMES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family):
    theirs = CLASSES[family]()
    mine = DEFAULTS[family]
    for key, value in mine.items():
        if key == "head_dim" and value is None:
            value = mine["hidden_size"] // mine["num_attention_heads"]
            assert getattr(theirs, key, None) in (None, value)
        elif key == "num_key_value_heads" and value is None:
            assert getattr(theirs, key) == mine["num_attention_heads"]
        else:
            assert getattr(theirs, key) == value, key
    assert theirs.rope_parameters["rope_theta"] == DEFAULT_ROPE_THETA


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_config_that_says_nothing_is_the_default_model(family):
    config = target_config({"architectures": [NAMES[family]]})
    theirs = CLASSES[family]()
    assert config.num_layers == theirs.num_hidden_layers
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert (config.qk_norm, config.qkv_bias) == (family == "qwen3", family == "qwen2")
    assert config.num_heads % config.num_kv_heads == 0 and not config.tie_embeddings


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_transformers_writes_is_read(family, tmp_path):
    """Both ways of saying RoPE: transformers 5 writes rope_parameters."""
    config = CLASSES[family](num_hidden_layers=3, architectures=[NAMES[family]])
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    config.save_pretrained(tmp_path)
    got = read_config(tmp_path, target_config)
    assert (got.num_layers, got.rope.theta, got.rope.scaling) == (3, 5e5, None)


def test_llama_3_scaling_in_both_spellings():
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    numbers["original_max_position_embeddings"] = 8192
    name = {"architectures": ["LlamaForCausalLM"]}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **numbers}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **numbers}}
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    for form in (old, new):
        got = target_config(name | form).rope
        assert (got.theta, got.scaling) == (5e5, scaling)
    del numbers["factor"]
    with pytest.raises(ValueError, match="lacks factor"):
        target_config(name | {"rope_scaling": {"rope_type": "llama3", **numbers}})


# Layers, D, FFN, heads, KV heads, block, layer ids, L: the table in dflash.md
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED = {
    "Qwen3-4B": (5, 2560, 9728, 32, 8, 16, [1, 9, 17, 25, 33], 36),
    "Qwen3-8B": (5, 4096, 12288, 32, 8, 16, [1, 9, 17, 25, 33], 36),
    "Qwen3-Coder-30B-A3B": (8, 2048, 6144, 32, 4, 16, [1, 12, 23, 34, 45], 48),
    "Llama-3.1-8B": (5, 4096, 12288, 32, 8, 10, [1, 8, 15, 22, 29], 32),
}


def published(name: str) -> dict:
    layers, width, ffn, heads, kv_heads, block, ids, targets = PUBLISHED[name]
    llama = name.startswith("Llama")
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": block,
        "dflash_config": {"mask_token_id": 128002 if llama else 151669, "target_layer_ids": ids},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ffn,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 131072 if llama else 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": targets,
        "rms_norm_eps": 1e-6,
        "rope_scaling": LLAMA3 if llama else None,
        "rope_theta": 500000 if llama else 1000000,
        "sliding_window": None,
        "tie_word_embeddings": not llama,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 128256 if llama else 151936,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters(name):
    layers, width, ffn, heads, kv_heads, block, ids, targets = PUBLISHED[name]
    got = drafter_config(published(name))
    assert (got.num_layers, got.hidden_size, got.intermediate_size) == (layers, width, ffn)
    assert (got.num_heads, got.num_kv_heads, got.head_dim) == (heads, kv_heads, 128)
    assert (got.block_size, got.num_target_layers) == (block, targets)
    assert got.target_layer_ids == tuple(ids) and got.qk_norm and not got.qkv_bias
    assert (got.rope.scaling is not None) == name.startswith("Llama")
    shapes = {s.name: s.shape for parts in leaf_sources(got).values() for s in parts}
    assert shapes["fc.weight"] == (width, len(ids) * width)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (kv_heads * 128, width)
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & shapes.keys()


def test_layer_ids_that_are_absent_follow_the_reference():
    raw = published("Qwen3-8B")
    del raw["dflash_config"]["target_layer_ids"]
    assert drafter_config(raw).target_layer_ids == (1, 9, 17, 25, 33)
    raw |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    assert drafter_config(raw).target_layer_ids == (18,)


def test_where_a_drafter_keeps_its_own_keys():
    """Inside dflash_config or at the top level; dflash_config wins."""
    raw = published("Qwen3-4B")
    own = raw["dflash_config"]
    flat = {k: v for k, v in raw.items() if k != "dflash_config"} | own
    assert drafter_config(flat) == drafter_config(raw)
    nested = {k: v for k, v in raw.items() if k != "block_size"}
    nested["dflash_config"] = own | {"block_size": 8}
    assert drafter_config(nested).block_size == 8
    assert drafter_config(nested | {"block_size": 12}).block_size == 8
    del nested["dflash_config"]["block_size"]
    assert drafter_config(nested).block_size == 16
    scales = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 20}
    got = drafter_config(raw | {"dflash_config": own | scales})
    assert (got.input_embedding_scale, got.output_multiplier) == (2.0, 0.5)
    assert got.final_logit_softcapping == 20.0


REFUSED_DRAFTERS = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, "sliding_window"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
    ({"rope_scaling": {"type": "yarn", "factor": 64.0}}, "'yarn'"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
    ({"is_causal": True}, "is_causal"),
    ({"num_target_layers": None}, "num_target_layers"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED_DRAFTERS)
def test_drafters_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        drafter_config(published("Qwen3-4B") | change)


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen3MoeForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM"),
        *("Qwen3NextForCausalLM", "MistralForCausalLM", "DFlashDraftModel"),
    ],
)
def test_targets_refused_by_name(name):
    with pytest.raises(ValueError, match=f"unsupported target {name}"):
        target_config({"architectures": [name]})


def test_a_config_names_one_architecture():
    for names in ([], None, ["Qwen3ForCausalLM", "LlamaForCausalLM"]):
        with pytest.raises(ValueError, match="one architecture"):
            target_config({"architectures": names})


# Companions


def test_stop_ids_in_their_order_of_preference(pair):
    tokenizer = load_tokenizer(pair.target)
    assert stop_token_ids(pair.target, tokenizer) == [EOS]
    (pair.target / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert stop_token_ids(pair.target, tokenizer) == [7, 8]
    (pair.target / "generation_config.json").write_text("{}")
    edit_config(pair.target, eos_token_id=9)
    assert stop_token_ids(pair.target, tokenizer) == [9]
    edit_config(pair.target, eos_token_id=None)
    assert stop_token_ids(pair.target, tokenizer) == [tokenizer.eos_token_id]
    assert stop_token_ids(pair.target) == []


def test_a_hub_id_offline_is_a_clear_and_quick_error():
    code = (
        "import time; from jflash.io import resolve; start = time.perf_counter()\n"
        "try: resolve('nobody/no-such-model')\n"
        "except ValueError as error: print(error, time.perf_counter() - start, sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    message, seconds = done.stdout.splitlines()
    assert "nobody/no-such-model: no such folder, and the hub cannot be reached" in message
    assert float(seconds) < 10
