"""Windows, causality and scaled RoPE of a drafter's config.json: as dflash and transformers say."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jflash.io.hf_config import drafter_config, target_config
from jflash.io.hf_write import to_hf_config
from jflash.layers.rope import rope_angles, rope_frequencies
from jflash.models.params import abstract_params
from jflash.records.specs import YarnScaling
from tests.io.test_hf_config import published

ROPES = json.loads((Path(__file__).parents[1] / "golden" / "rope.json").read_text())
BASE = published("Qwen3-4B")
TYPES = ["sliding_attention", "full_attention"]


def sights(**changes) -> list[tuple[int | None, bool]]:
    config = drafter_config(BASE | changes)
    return [(mixer.window, mixer.causal) for mixer in config.mixers]


MIXED = {"layer_types": [TYPES[0]] * 4 + [TYPES[1]], "use_sliding_window": True}
MIXED |= {"sliding_window": 2048}


def test_layers_with_a_window_are_causal_unless_the_config_says_otherwise():
    assert sights() == [(None, False)] * 5
    assert sights(**MIXED) == [(2048, True)] * 4 + [(None, False)]
    assert sights(**MIXED, is_causal=None) == sights(**MIXED)
    assert sights(**MIXED, is_causal=False) == [(2048, False)] * 4 + [(None, False)]
    assert sights(**MIXED, is_causal=True) == [(2048, True)] * 4 + [(None, True)]
    assert sights(is_causal=True) == [(None, True)] * 5
    # A window that no layer uses is none.
    assert sights(use_sliding_window=True, sliding_window=4096) == [(None, False)] * 5


@pytest.mark.parametrize(
    "given",
    [
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 2},
        {},
    ],
)
def test_without_layer_types_the_windows_are_those_of_transformers(given):
    raw = {k: v for k, v in BASE.items() if k not in ("layer_types", "max_window_layers")}
    raw = {k: v for k, v in raw.items() if "sliding" not in k} | given
    theirs = transformers.Qwen3Config(**{k: raw[k] for k in ("num_hidden_layers", *given)})
    got = drafter_config(raw)
    for i, kind in enumerate(theirs.layer_types):
        window = theirs.sliding_window if kind == "sliding_attention" else None
        mixer = got.mixers[i]
        assert (mixer.window, mixer.causal) == (window, window is not None)


def test_what_is_written_is_read():
    for is_causal in (None, True, False):
        config = drafter_config(BASE | MIXED | {"is_causal": is_causal})
        assert drafter_config(to_hf_config(config, "float32")) == config
    plain = drafter_config(BASE)
    assert "layer_types" not in to_hf_config(plain, "float32")
    two = ({"window": 5, "causal": True}, {"window": 6, "causal": True}, {}, {}, {})
    with pytest.raises(ValueError, match="one sliding_window"):
        to_hf_config(plain.attending(*two), "float32")


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_targets_with_windows_are_refused_by_name(family):
    """Those in which some layer has one, by transformers' classes; Qwen3-MoE's asks one key."""
    raw = {"architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 5}
    last, late = ({"use_sliding_window": True, "max_window_layers": n} for n in (4, 5))
    none = last | {"sliding_window": None}
    for given in (MIXED, last, *([late] if family == "Qwen3Moe" else [])):
        with pytest.raises(ValueError, match="sliding_window: targets"):
            target_config(raw | given)
    plain = target_config(raw)
    full = last | {"layer_types": [TYPES[1]] * 5}
    for given in (none, *([] if family == "Qwen3Moe" else [late, full])):
        assert target_config(raw | given) == plain


@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_is_that_of_transformers(name, old):
    want = ROPES[name]
    given, theta, sizes = want["rope_parameters"], want["rope_theta"], want["sizes"]
    scaling = {("type" if k == "rope_type" else k): v for k, v in given.items()}
    said = {"rope_theta": theta, "rope_scaling": scaling}
    if not old:
        said = {"rope_parameters": given | {"rope_theta": theta}}
    raw = {k: v for k, v in BASE.items() if not k.startswith("rope")} | sizes | said
    rope = drafter_config(raw).mixers[0].rope
    np.testing.assert_allclose(rope_frequencies(rope, 64), want["inv_freq"], rtol=1e-5)
    cos, sin = rope_angles(jnp.array([[0, 1, 7, 100]]), rope, 64)
    angles = np.array([[0], [1], [7], [100]]) * np.array(want["inv_freq"])
    np.testing.assert_allclose(cos[0], np.cos(angles) * want["attention_scaling"], atol=2e-4)
    np.testing.assert_allclose(sin[0], np.sin(angles) * want["attention_scaling"], atol=2e-4)


# Layers with a window and without, window, D, FFN, heads, block, layer ids, L, mask, vocabulary,
# and the parameters that these shapes have. Plausible, but not taken from a published file, are the
# vocabularies, Gemma's window, scale and cap, the masks of Qwen3.6 and Kimi, the bases of RoPE but
# Qwen3.5's, and the numbers of gpt-oss's YaRN, which are its target's.
PUBLISHED = {
    "gpt-oss-20b": (
        0, 8, None, 2880, 7680, 64, 8, [1, 6, 11, 16, 21], 24, 200000, 201088, 784_703_104,
    ),
    "gpt-oss-120b": (
        0, 8, None, 2880, 7680, 64, 10, [1, 9, 17, 25, 33], 36, 200000, 201088, 784_703_104,
    ),
    "Qwen3.5-4B": (
        5, 1, 4096, 2560, 9216, 32, 16, list(range(1, 30, 4)), 32, 248070, 248320, 634_425_856,
    ),
    "Qwen3.5-9B": (
        5, 1, 4096, 4096, 12288, 32, 16, list(range(1, 30, 4)), 32, 248070, 248320, 1_291_904_512,
    ),
    "Qwen3.6-27B": (
        4, 1, 2048, 5120, 17408, 32, 16, [1, 16, 31, 46, 61], 64, 248070, 248320, 1_730_213_120,
    ),
    "Gemma-4-31B": (
        4, 1, 2048, 5376, 10752, 64, 16, [1, 12, 23, 35, 46, 57], 60, 4, 262144, 1_535_967_488,
    ),
    "Kimi-K2.5": (
        0, 6, None, 7168, 18432, 64, 8, [1, 12, 24, 35, 47, 58], 61, 163838, 163840, 3_479_277_056,
    ),
}  # fmt: skip


def head_dim(name: str) -> int:
    return 64 if name.startswith("gpt-oss") else 128


def windowed(name: str) -> dict:
    """config.json of a published drafter, its block in dflash_config as the newer ones have it."""
    near, far, window, width, ffn, heads, block, ids, targets, mask, vocab, _ = PUBLISHED[name]
    rope = {"rope_theta": 1e7, "rope_type": "default"}
    if name.startswith("Kimi"):
        rope = ROPES["yarn of kimi"]["rope_parameters"] | {"rope_theta": 50000.0}
    if name.startswith("gpt-oss"):
        rope = ROPES["yarn of gpt-oss"]["rope_parameters"] | {"rope_theta": 150000.0}
    own = {"block_size": block, "mask_token_id": mask, "target_layer_ids": ids}
    if name.startswith("Gemma"):
        own |= {"input_embedding_scale": width**0.5, "final_logit_softcapping": 30.0}
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dflash_config": own,
        "dtype": "bfloat16",
        "head_dim": head_dim(name),
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ffn,
        "layer_types": [TYPES[0]] * near + [TYPES[1]] * far,
        "max_position_embeddings": 262144,
        "max_window_layers": near + far,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": near + far,
        "num_key_value_heads": 8,
        "num_target_layers": targets,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": bool(near),
        "vocab_size": vocab,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters(name):
    near, far, window, width, ffn, heads, block, ids, targets, mask, _, count = PUBLISHED[name]
    raw = windowed(name)
    config = drafter_config(raw)
    seen = [(mixer.window, mixer.causal) for mixer in config.mixers]
    assert seen == [(window, True)] * near + [(None, False)] * far
    assert (config.block_size, config.mask_token_id) == (block, mask)
    assert (config.target_layer_ids, config.num_target_layers) == (tuple(ids), targets)
    own = raw.pop("dflash_config")
    assert drafter_config(raw | own) == config  # at either level
    leaves = jax.tree.leaves(abstract_params(config))
    assert (
        config.mixers[0].num_heads,
        config.mixers[0].num_kv_heads,
        config.mixers[0].head_dim,
    ) == (heads, 8, head_dim(name))
    head = config.mixers[0].head_dim
    layer = width * (2 * heads + 2 * 8) * head + 3 * width * ffn + 2 * width + 2 * head
    by_hand = (near + far) * layer + len(ids) * width * width + 2 * width
    assert sum(leaf.size for leaf in leaves) == by_hand == count
    if name.startswith("Kimi"):  # both of its factors are 1: no stretching of the scores
        assert (
            config.mixers[0].rope.scaling.factor,
            config.mixers[0].rope.scaling.attention_factor,
        ) == (64.0, 1.0)
    if name.startswith("gpt-oss"):
        assert (
            isinstance(config.mixers[0].rope.scaling, YarnScaling)
            and not config.mixers[0].rope.scaling.truncate
        )
