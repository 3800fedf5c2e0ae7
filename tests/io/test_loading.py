"""Hugging Face folders to parameters: nothing guessed, strict both ways."""

import json
import os
import pkgutil
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import load_file, save_file

from jflash.io import (
    configure_pair,
    convert_checkpoint,
    load_drafter,
    load_pair,
    load_target,
    load_tokenizer,
    load_weights,
    open_checkpoint,
    resolve,
    save_checkpoint,
    stop_token_ids,
)
from jflash.io.families import llama
from jflash.io.hf_config import drafter_config, target_config
from jflash.io.names import leaf_sources
from jflash.records.config import TargetConfig
from tests.support.gguf_files import write_gguf
from tests.support.small_checkpoints import (
    DRAFTER,
    EOS,
    SIZES,
    TARGET,
    Folders,
    edit_config,
    edit_tensors,
    make_pair,
    unit_gain_params,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pair(tmp_path) -> Folders:
    return make_pair(tmp_path)


def error_of(folder: Path, load=load_target) -> str:
    with pytest.raises(ValueError) as error:
        load(folder)
    return str(error.value)


def test_a_full_disc_is_told_and_leaves_the_old_weights(pair):
    drafter, params = load_drafter(pair.drafter, "float32")
    weights, before = pair.drafter / "model.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    old = weights.read_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(
            ValueError, match=r"cannot write the weights to .*/drafter: .*too large"
        ):
            save_checkpoint(pair.drafter, drafter.config, params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert weights.read_bytes() == old and not [*pair.drafter.glob(".*")]


def test_who_may_read_the_config_may_read_the_weights(pair):
    drafter, params = load_drafter(pair.drafter, "float32")
    before = os.umask(0o027)
    try:
        save_checkpoint(pair.drafter, drafter.config, params)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in pair.drafter.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == 0o640


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of float32, bfloat16"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of"),
        ({"extra_config": {"eos_token_id": np.int32(3)}}, "int32 is not JSON serializable"),
        ({"extra_config": {"rope_theta": float("nan")}}, "extra_config .* is no JSON"),
        ({"extra_config": [("eos_token_id", 3)]}, "extra_config .* must map keys to values"),
    ],
)
def test_what_loading_would_refuse_is_not_written(pair, tmp_path, more, why):
    """Weights cut to whole numbers, or new ones beside an old config, were found out when read."""
    drafter, params = load_drafter(pair.drafter, "float32")
    with pytest.raises(ValueError, match=why):
        save_checkpoint(tmp_path / "new", drafter.config, params, **more)
    assert not (tmp_path / "new").exists()


def test_a_model_in_place_of_its_config_is_not_written(pair, tmp_path, monkeypatch):
    """What `load_target` gives, given on; and '' is no name of the folder that a process is in."""
    model: Any = load_drafter(pair.drafter, "float32")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"config .* must be a model's: give target\.config"):
        save_checkpoint("new", *model)
    with pytest.raises(ValueError, match="the path '' is empty"):
        save_checkpoint("", model[0].config, model[1])
    assert not [*tmp_path.glob("*.safetensors"), *tmp_path.glob("new")]


def test_parameters_of_another_model_are_not_written(pair, tmp_path):
    """They ended with a KeyError, or as a file that does not load."""
    (target, params), (_, drafters) = load_target(pair.target), load_drafter(pair.drafter)
    wrong = params | {"embedding": params["embedding"][:-1]}
    for given, why in (
        (drafters, "are not the config's: embedding is missing, expected"),
        (None, "embedding is missing"),
        (wrong, r"embedding is \(\d+, 32\), expected \(\d+, 32\)"),
    ):
        with pytest.raises(ValueError, match=why):
            save_checkpoint(tmp_path / "new", target.config, given)
    assert not (tmp_path / "new").exists()


def test_a_link_to_a_folder_to_come_is_followed(pair, tmp_path):
    """It was no folder and could not become one, which came out when a training had ended."""
    drafter, params = load_drafter(pair.drafter, "float32")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "drafter")
    save_checkpoint(tmp_path / "link", drafter.config, params)
    assert (tmp_path / "far/drafter/model.safetensors").is_file()
    assert load_drafter(tmp_path / "link")[0].config == drafter.config


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


def test_a_whole_file_comes_before_old_shards(pair):
    """As transformers chooses; both models fit the config."""
    shard(pair.target)
    new = unit_gain_params(TARGET, 5)
    save_checkpoint(pair.target, TARGET, new, "float32")
    jax.tree.map(np.testing.assert_array_equal, new, load_target(pair.target)[1])


def test_a_second_copy_of_the_weights_is_not_read(pair):
    """Mistral's, under its own names; alone it is no checkpoint of transformers."""
    second = pair.target / "consolidated.safetensors"
    save_file({"layers.0.attention.wq.weight": np.zeros((2, 2), np.float32)}, second)
    load_target(pair.target)
    (pair.target / "model.safetensors").unlink()
    assert "the tensors are those of 1" in error_of(pair.target)


@pytest.mark.parametrize("name", ["model.fp16", "model.fp16-00001-of-00002"])
def test_a_variant_of_the_weights_is_not_read(pair, name):
    """As in transformers, unless it is asked for by its name; a file of another name is read."""
    whole, variant = pair.target / "model.safetensors", pair.target / f"{name}.safetensors"
    want = load_target(pair.target)[1]
    save_file({key: x + 1 for key, x in load_file(whole).items()}, variant)
    jax.tree.map(np.testing.assert_array_equal, load_target(pair.target)[1], want)
    variant.rename(pair.target / "more.safetensors")
    assert "more.safetensors" in error_of(pair.target)


def test_shards_that_are_missing_cut_or_not_indexed(pair):
    shard(pair.target)
    second = pair.target / "model-00002-of-00002.safetensors"
    os.truncate(second, second.stat().st_size - 10)
    assert f"{second} is corrupt or truncated" in error_of(pair.target)
    second.unlink()
    assert "files that are not there: 'model-00002" in error_of(pair.target)
    (pair.target / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in error_of(pair.target)


def test_a_folder_of_gguf_files_is_told_to_be_one(tmp_path):
    (tmp_path / "b.Q8_0.gguf").touch()
    (tmp_path / "a.Q4_1.gguf").touch()
    assert "give a file of it, 'a.Q4_1.gguf'" in error_of(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "generation_config.json", "chat_template.jinja"]
)
def test_a_link_to_a_file_that_is_gone_is_named(pair, name):
    """As in a hub's cache that was pruned; without its generation_config other ids end a text."""
    (pair.target / "notes.md").symlink_to("gone")  # which is never read
    (pair.target / "consolidated.safetensors").symlink_to("gone")  # a second copy is passed over
    load_target(pair.target)
    (pair.target / name).unlink(missing_ok=True)
    (pair.target / name).symlink_to("gone")
    assert error_of(pair.target).endswith(
        f"links to files that are not there: '{name}': download the checkpoint again"
    )
    with pytest.raises(ValueError, match="links to files that are not there"):
        stop_token_ids(pair.target)


def test_both_checkpoints_are_checked_before_either_is_read(pair, monkeypatch):
    edit_tensors(pair.drafter, drop=("norm.weight",))
    read = []
    monkeypatch.setattr("jflash.io.read_ahead.read", lambda *args: read.append(args))
    with pytest.raises(ValueError, match=r"missing: norm\.weight"):
        load_pair(*pair)
    assert not read


@pytest.mark.parametrize("form", ["safetensors", "orbax", "gguf"])
def test_every_header_and_config_is_read_once(form, pair, tmp_path, monkeypatch):
    """By all that a command asks: configs, tokenizer and stops, checks and weights."""
    target, drafter = pair
    if form == "orbax":
        convert_checkpoint(pair.target, target := tmp_path / "target-orbax")
        convert_checkpoint(pair.drafter, drafter := tmp_path / "drafter-orbax")
    if form == "gguf":
        target, drafter = write_gguf(tmp_path / "a.gguf"), None
    readers = {
        "safetensors": "jflash.io.safetensors_checkpoint._tensors",
        "orbax": "jflash.io.orbax_checkpoint._stored",
        "gguf": "jflash.io.gguf.file.read_header",
    }
    honest, read = pkgutil.resolve_name(readers[form]), []
    monkeypatch.setattr(readers[form], lambda *given: read.append(given) or honest(*given))
    files = configure_pair(target, drafter)
    tokenizer = files.target.tokenizer()
    for folder in () if form == "gguf" else (target, drafter):
        (folder / "config.json").write_text("{")  # it was read before
    files.target.stop_ids(tokenizer)
    load_weights(files)
    assert len(read) == (1 if form == "gguf" else 2)


def test_dropped_names_are_no_errors(pair):
    """Old files store RoPE tables; a tied model may store its head; re-exports prefix `model.`."""
    edit_tensors(pair.target, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")})
    load_target(pair.target)
    edit_config(pair.target, tie_word_embeddings=True)
    embedding = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(pair.target, **{"lm_head.weight": embedding})
    assert "head" not in load_target(pair.target)[1]
    stored = load_file(pair.drafter / "model.safetensors")
    want = load_drafter(pair.drafter)[1]
    renamed = {f"model.{name}": tensor for name, tensor in stored.items()}
    save_file(renamed, pair.drafter / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, want, load_drafter(pair.drafter)[1])
    save_file(renamed | stored, pair.drafter / "model.safetensors")
    assert "given twice: fc.weight (fc.weight in" in error_of(pair.drafter, load_drafter)


def test_a_head_that_is_not_the_embedding_is_not_passed_over(pair):
    """transformers warns that it will not tie such a head, and reads it."""
    edit_config(pair.target, tie_word_embeddings=True)
    told = r"tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight"
    assert told in error_of(pair.target)
    embedding = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    for other in (embedding[::-1], embedding[:-1], embedding.astype(np.float16)):
        edit_tensors(pair.target, **{"lm_head.weight": np.ascontiguousarray(other)})
        assert told in error_of(pair.target)


@pytest.mark.parametrize("change", [{"qkv_bias": True, "qk_norm": False}, {"mlp_bias": True}, {}])
def test_every_leaf_of_every_family_has_a_source(change):
    config = TargetConfig.alike(**(SIZES | {"num_layers": 2, "tie_embeddings": False} | change))
    names = [part.name for parts in leaf_sources(config, llama.NAMES).values() for part in parts]
    assert len(names) == len(set(names))
    assert any(name.endswith("q_proj.bias") for name in names) == bool(change.get("qkv_bias"))
    assert any("q_norm" in name for name in names) == change.get("qk_norm", True)


def test_dtype_on_request(pair):
    assert load_target(pair.target, "bfloat16")[1]["embedding"].dtype == "bfloat16"
    with pytest.raises(ValueError, match="float16"):
        load_target(pair.target, "float16")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"mesh": "two"}, r"mesh 'two' is no jax\.sharding\.Mesh"),
        ({"batch": 1.5}, "batch 1.5 must be a whole number"),
        ({"batch": "8"}, "batch '8' must be a whole number"),
        ({"batch": 0}, "batch 0 must be at least 1"),
    ],
)
def test_a_pair_for_what_is_no_batch_and_no_mesh(pair, more, why):
    with pytest.raises(ValueError, match=why):
        load_pair(*pair, **more)


@pytest.mark.parametrize("drafted", [True, False])
def test_a_block_size_of_another_type(pair, drafted):
    drafter, size = pair.drafter if drafted else None, cast(Any, "4")
    with pytest.raises(ValueError, match="block size '4' must be a whole number"):
        configure_pair(pair.target, drafter, block_size=size)


def test_configuring_a_pair_reads_no_weights(pair):
    for folder in pair:
        (folder / "model.safetensors").unlink()
    files = configure_pair(*pair, block_size=3)
    assert (files.models.block_size, files.models.taps) == (3, (0, 1))


def test_written_configs_are_read_back(pair):
    assert open_checkpoint(pair.target).config(target_config) == TARGET
    assert open_checkpoint(pair.drafter).config(drafter_config) == DRAFTER


def test_stop_ids_in_their_order_of_preference(pair):
    tokenizer = load_tokenizer(pair.target)
    assert stop_token_ids(pair.target, tokenizer) == [EOS]
    (pair.target / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert stop_token_ids(pair.target, tokenizer) == [7, 8]
    (pair.target / "generation_config.json").write_text("{}")
    edit_config(pair.target, eos_token_id=9)
    assert stop_token_ids(pair.target, tokenizer) == [9]
    edit_config(pair.target, text_config={"eos_token_id": [5, 6]})
    assert stop_token_ids(pair.target, tokenizer) == [9]
    edit_config(pair.target, eos_token_id=None)
    assert stop_token_ids(pair.target) == [5, 6]  # of a model that sees, as transformers takes it
    edit_config(pair.target, text_config=None)
    assert stop_token_ids(pair.target, tokenizer) == [tokenizer.eos_token_id]
    assert stop_token_ids(pair.target) == []


def test_a_config_is_whole_or_not_there(tmp_path, monkeypatch):
    """It says that the weights beside it are finished."""
    write = Path.write_text

    def full_disc(path: Path, text: str, **kwargs):
        write(path, text[: len(text) // 2], **kwargs)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full_disc)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, DRAFTER, unit_gain_params(DRAFTER, 0), "float32")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_lies_twice_in_a_hub_is_not_downloaded_twice(monkeypatch, tmp_path):
    """gpt-oss's weights are in `original` once more, Mistral's in a file beside the shards.

    A pattern's star takes slashes.
    """
    read = ["config.json", "model-00001-of-00002.safetensors", "orbax/d/0a", "mask_embedding.pt"]
    more = ["original/model.safetensors", "original/config.json", "metal/model.bin", "README.md"]
    more += ["consolidated.safetensors", "consolidated.00.safetensors"]
    taken = []

    def download(hub_id: str, **patterns):
        taken.extend(filter_repo_objects([*read, *more], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("openai/gpt-oss-20b") == tmp_path
    assert taken == read


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
