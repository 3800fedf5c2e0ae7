"""DFlash 2 checkpoints in and out: tensors by the published names, both configs, the sizes."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash.compiled.shape import Shape, new_state
from jflash.io import convert_checkpoint, load_drafter, load_pair, save_checkpoint
from jflash.io.families import dflash
from jflash.io.hf_config import drafter_config
from jflash.io.hf_write import to_hf_config
from jflash.io.names import leaf_sources
from jflash.memory import memory_budget
from jflash.models.params import abstract_params
from jflash.records.config import Drafter2Config, second_version
from tests.support.small_checkpoints import (
    DRAFTER,
    Folders,
    edit_config,
    edit_tensors,
    make_pair,
    unit_gain_params,
)

SMALL = second_version(
    DRAFTER, conv_kernel_size=3, conv_group_size=4, selector_rank=6, selector_top_k=5
)
OWN = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Layers, D, FFN, heads, KV heads, block, layer ids, L, and what is in dflash_config besides.
# How long their windows are is ours, and the first's vocabulary stands for the second's.
PUBLISHED: dict[str, tuple] = {
    "Qwen3.8-27B": (5, 5120, 17408, 32, 8, 8, [5, 19, 33, 47, 61], 64, {}),
    "Muse-Glimmer-30B": (
        5, 6656, 19968, 32, 8, 16, [1, 13, 25, 37, 49], 52,
        {"final_logit_softcapping": 20.0, "output_multiplier": 0.19612},
    ),
}  # fmt: skip
VOCABULARY = 248_320


@pytest.fixture
def pair(tmp_path) -> Folders:
    folders = make_pair(tmp_path)
    save_checkpoint(folders.drafter, SMALL, unit_gain_params(SMALL, 7), "float32")
    return folders


def test_every_tensor_lands_in_its_leaf(pair):
    stored = load_file(pair.drafter / "model.safetensors")
    drafter, params = load_drafter(pair.drafter)
    assert drafter.config == SMALL
    for name in ("predecessor_codebook", "successor_codebook"):  # no .weight, not transposed
        leaf = params["candidate_selector"][name]
        np.testing.assert_array_equal(leaf, stored[f"candidate_selector.{name}"])
    for ours, theirs in [
        (params["candidate_selector"]["hidden_projection"], "candidate_selector.hidden_projection"),
        (
            params["layers_0"]["mlp_conv"]["kernel_projection"],
            "layers.0.mlp_conv.kernel_projection",
        ),
    ]:
        np.testing.assert_array_equal(ours["kernel"], stored[f"{theirs}.weight"].T)
    base = params["layers_0"]["attention_conv"]["base_kernel"]
    np.testing.assert_array_equal(base, stored["layers.0.attention_conv.base_kernel"])
    assert base.shape == (2, 3, SMALL.hidden_size)


def test_a_re_export_may_prefix_every_name(pair):
    want = load_drafter(pair.drafter)[1]
    stored = load_file(pair.drafter / "model.safetensors")
    renamed = {f"model.{name}": tensor for name, tensor in stored.items()}
    save_file(renamed, pair.drafter / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, want, load_drafter(pair.drafter)[1])


@pytest.mark.parametrize("lead", ["", "model."])
def test_codebooks_as_dflash_saves_them(pair, lead):
    """Its save_pretrained names them as weights of embeddings; both names are too many."""
    want = load_drafter(pair.drafter)[1]
    stored = load_file(pair.drafter / "model.safetensors")
    saved = {
        f"{lead}{name}.weight" if name.endswith("codebook") else f"{lead}{name}": tensor
        for name, tensor in stored.items()
    }
    assert len(saved.keys() - stored.keys()) >= 2
    save_file(saved, pair.drafter / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, want, load_drafter(pair.drafter)[1])
    name = "candidate_selector.successor_codebook"
    edit_tensors(pair.drafter, **{name: stored[name]})
    with pytest.raises(ValueError, match=rf"given twice: {name} \("):
        load_drafter(pair.drafter)


def test_what_does_not_fit_is_listed(pair):
    edit_tensors(
        pair.drafter,
        drop=("candidate_selector.successor_codebook",),
        **{
            "layers.0.mlp_conv.base_kernel": np.ones((2, 2, SMALL.hidden_size), "f4"),
            "candidate_selector.extra": np.ones(3, "f4"),
        },
    )
    with pytest.raises(ValueError) as error:
        load_drafter(pair.drafter)
    for complaint in (
        "missing: candidate_selector.successor_codebook",
        "wrong shape: layers.0.mlp_conv.base_kernel",
        "unknown: candidate_selector.extra",
    ):
        assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"conv_group_size": 5}, "is not a multiple of conv_group_size 5"),
        ({"selector_top_k": 10_000}, "selector_top_k 10000 is more than the vocabulary"),
        ({"selector_rank": 0}, "selector_rank must be at least 1, got 0"),
        ({"conv_kernel_size": None}, "config.json lacks conv_kernel_size"),
    ],
)
def test_bad_configs_are_refused(pair, change, complaint):
    own = json.loads((pair.drafter / "config.json").read_text())["dflash_config"]
    kept = {key: value for key, value in (own | change).items() if value is not None}
    edit_config(pair.drafter, dflash_config=kept)
    with pytest.raises(ValueError, match=complaint):
        load_pair(*pair)


def test_orbax_holds_the_same_bits(pair, tmp_path):
    convert_checkpoint(pair.drafter, tmp_path / "orbax")
    want, got = load_drafter(pair.drafter), load_drafter(tmp_path / "orbax")
    assert got[0].config == want[0].config == SMALL
    jax.tree.map(np.testing.assert_array_equal, want[1], got[1])


def test_the_budget_is_what_a_loaded_pair_takes(pair):
    both = load_pair(*pair, dtype="float32")
    shape = Shape(3, 512, 128, 16)
    budget = memory_budget(both.models, shape)
    assert budget.weights == sum(x.nbytes for x in jax.tree.leaves(both.params))
    state = jax.eval_shape(lambda: new_state(both.models, shape))
    assert budget.caches == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def published(name: str) -> dict[str, Any]:
    layers, width, ffn, heads, kv_heads, block, ids, targets, more = PUBLISHED[name]
    return {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            "block_size": block, "mask_token_id": 248_070, "target_layer_ids": ids,
            "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
            "selector_top_k": 16, **more,
        },
        "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": width,
        "intermediate_size": ffn, "is_causal": False, "max_position_embeddings": 262_144,
        "layer_types": ["sliding_attention"] * layers, "sliding_window": 2048,
        "use_sliding_window": True,
        "model_type": "qwen3", "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "num_target_layers": targets, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "tie_word_embeddings": False, "vocab_size": VOCABULARY,
    }  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters(name):
    layers, width, ffn, heads, kv_heads, block, ids, _, more = PUBLISHED[name]
    raw = published(name)
    got = drafter_config(raw)
    assert isinstance(got, Drafter2Config)
    assert [getattr(got, key) for key in OWN] == [2, 16, 256, 16]
    assert got.windows == (2048,) * layers and not any(m.causal for m in got.mixers)
    assert (got.block_size, got.target_layer_ids) == (block, tuple(ids))
    assert got.output_multiplier == more.get("output_multiplier", 1.0)
    inner = raw.pop("dflash_config")
    assert drafter_config(raw | inner) == got  # the same keys at the top level
    assert drafter_config(to_hf_config(got, "bfloat16")) == got
    shapes = {s.name: s.shape for parts in leaf_sources(got, dflash.NAMES).values() for s in parts}
    conv = "layers.4.attention_conv."
    assert shapes[f"{conv}base_kernel"] == (2, 2, width)
    assert shapes[f"{conv}kernel_projection.weight"] == (2 * 2 * width // 16, width)
    assert shapes["candidate_selector.predecessor_codebook"] == (VOCABULARY, 256)
    attention = 2 * width * 128 * (heads + kv_heads) + 2 * 128
    convolutions = 2 * (4 * width + width * width // 4)
    layer = attention + 3 * width * ffn + 2 * width + convolutions
    selector = 2 * VOCABULARY * 256 + 256 * width
    total = layers * layer + len(ids) * width**2 + 2 * width + selector
    assert sum(x.size for x in jax.tree.leaves(abstract_params(got))) == total


def test_versions_are_told_apart():
    first = published("Qwen3.8-27B") | {"architectures": ["DFlashDraftModel"]}
    assert not isinstance(drafter_config(first), Drafter2Config)
    assert to_hf_config(SMALL, "float32")["architectures"] == ["DFlash2DraftModel"]
    assert to_hf_config(DRAFTER, "float32")["architectures"] == ["DFlashDraftModel"]
