"""Hugging Face configs: transformers' defaults, published drafters, and refusals by name."""

import functools
from dataclasses import replace

import pytest
import transformers

from jflash.bench.shapes import model_shape
from jflash.io import open_checkpoint
from jflash.io.families import dflash
from jflash.io.hf_config import FAMILIES, drafter_config, target_config
from jflash.io.hf_rope import DEFAULT_ROPE_THETA
from jflash.io.hf_write import to_hf_config
from jflash.io.names import leaf_sources
from jflash.memory import weight_bytes
from jflash.records.config import TargetConfig
from jflash.records.specs import Llama3Scaling, ProportionalScaling, RopeConfig

CLASSES = {
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": functools.partial(transformers.MistralConfig, sliding_window=None),
    "qwen3_5": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
    "gpt_oss": transformers.GptOssConfig,
    "minimax_m2": transformers.MiniMaxM2Config,
    # Its defaults give heads of 42 dims, half of which cannot turn.
    "glm4_moe": functools.partial(transformers.Glm4MoeConfig, head_dim=128),
    "glm4": transformers.Glm4Config,
}
NORMED = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "minimax_m2")
BIASED = ("qwen2", "gpt_oss", "glm4")
NAMES = {family.MODEL_TYPE: family.ARCHITECTURE for family in FAMILIES}
# Not every layer has the same RoPE there: test_gemma_config.py and test_muse.py.
APART = {"gemma3_text", "gemma4_text", "muse_glimmer"}
DEFAULTS = {f.MODEL_TYPE: f.DEFAULTS for f in FAMILIES if f.MODEL_TYPE not in APART}


def default_model(family: str) -> TargetConfig:
    """A family's target whose config.json gives no sizes."""
    given = {"gpt_oss": {}, "glm4_moe": {"head_dim": 128}}.get(family, {"sliding_window": None})
    return target_config({"architectures": [NAMES[family]]} | given)


def rope_of(config: TargetConfig) -> RopeConfig:
    return next(mixer.rope for mixer in config.mixers if mixer.rope)


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family):
    theirs = CLASSES[family]()
    mine = {key: value for key, value in DEFAULTS[family].items() if key != "sliding_window"}
    for key, value in mine.items():
        if key == "head_dim" and value is None:
            value = mine["hidden_size"] // mine["num_attention_heads"]
            assert family == "glm4_moe" or getattr(theirs, key, None) in (None, value)
        elif key == "num_key_value_heads" and value is None:
            assert getattr(theirs, key) == mine["num_attention_heads"]
        elif key == "full_attention_interval":
            kinds = ["linear_attention"] * (value - 1) + ["full_attention"]
            assert theirs.layer_types == kinds * (theirs.num_hidden_layers // value)
        elif key == "partial_rotary_factor":
            assert theirs.rope_parameters.get(key, 1.0) == value
        elif key == "intermediate_size" and family == "qwen3_5_moe":
            assert not hasattr(theirs, key)  # no layer is dense
        else:
            assert getattr(theirs, key) == value, key
    want = theirs.rope_parameters["rope_theta"]
    assert rope_of(default_model(family)).theta == want
    assert (want == DEFAULT_ROPE_THETA) == (family not in ("gpt_oss", "minimax_m2"))


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_config_that_says_nothing_is_the_default_model(family):
    config = default_model(family)
    theirs = CLASSES[family]()
    assert config.num_layers == theirs.num_hidden_layers
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert (config.mixers[0].qk_norm, config.mixers[0].qkv_bias) == (
        family in NORMED,
        family in BIASED,
    )
    assert (
        config.mixers[0].num_heads % config.mixers[0].num_kv_heads == 0
        and not config.tie_embeddings
    )


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_transformers_writes_is_read(family, tmp_path):
    """Both ways of saying RoPE: transformers 5 writes rope_parameters."""
    config = CLASSES[family](num_hidden_layers=4, architectures=[NAMES[family]])
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    config.save_pretrained(tmp_path)
    got = open_checkpoint(tmp_path).config(target_config)
    assert (got.num_layers, rope_of(got).theta, rope_of(got).scaling) == (4, 5e5, None)


@pytest.mark.parametrize(
    ("family", "other", "name"),
    [
        ("gpt_oss", "num_experts", "num_local_experts"),
        ("minimax_m2", "num_experts", "num_local_experts"),
        ("glm4_moe", "num_local_experts", "n_routed_experts"),
    ],
)
def test_the_number_of_experts_has_two_names(family, other, name):
    raw = {"architectures": [NAMES[family]], "head_dim": 128}
    for given in ({other: 16}, {name: 32, other: 16}):
        theirs = CLASSES[family](**given)
        got = target_config(raw | given).experts[0].num_experts
        assert got == getattr(theirs, name) == 16
    with pytest.raises(ValueError, match=f"{other} must be a whole number"):
        target_config(raw | {other: "16"})


def test_a_mistral_with_a_window_is_refused():
    """4,096 tokens are transformers' default: a key that is absent is a window, null is none."""
    default = transformers.MistralConfig().sliding_window
    assert default == DEFAULTS["mistral"]["sliding_window"]
    name = {"architectures": ["MistralForCausalLM"]}
    for given in ({}, {"sliding_window": default}, {"sliding_window": 64}):
        with pytest.raises(ValueError, match=r"sliding_window \d+: targets with windows"):
            target_config(name | given)
    config = target_config(name | {"sliding_window": None, "attention_bias": True})
    assert not config.mixers[0].qkv_bias  # transformers' Mistral does not read attention_bias


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
        got = target_config(name | form).mixers[0].rope
        assert (got.theta, got.scaling) == (5e5, scaling)
        beside = name | form | {"original_max_position_embeddings": 4096}  # that one counts
        want = replace(scaling, original_max_position_embeddings=4096)
        assert target_config(beside).mixers[0].rope.scaling == want


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_llama_3_scaling_of_a_file_that_does_not_say_how_long_texts_were(form):
    given = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    theirs = transformers.LlamaConfig(max_position_embeddings=4096, **{form: dict(given)})
    raw = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, form: given}
    scaling = rope_of(target_config(raw)).scaling
    assert isinstance(scaling, Llama3Scaling)
    name = "original_max_position_embeddings"
    assert getattr(scaling, name) == theirs.rope_parameters[name] == 4096


@pytest.mark.parametrize(
    "given",
    [
        # Of both keys transformers reads the older one.
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_theta": 9e9}},
        {"rope_scaling": {"rope_type": None, "type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "partial_rotary_factor": None}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": None}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "partial_rotary_factor": None},
    ],
)
def test_null_in_rope_is_as_good_as_absent(given):
    name = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5}
    want = target_config(name | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert target_config(name | given) == want


def test_the_share_of_a_proportional_rope_may_stand_beside_it():
    name = {"architectures": ["LlamaForCausalLM"], "head_dim": 64}
    rope = {"rope_type": "proportional", "rope_theta": 5e5}
    within = {"rope_parameters": rope | {"partial_rotary_factor": 0.25}}
    config = target_config(name | within)
    assert config.mixers[0].rope.scaling.turning == 8
    for share in (0.25, 0.5):  # that of rope_parameters counts
        assert target_config(name | within | {"partial_rotary_factor": share}) == config
    beside = {"rope_parameters": rope, "partial_rotary_factor": 0.25}
    assert target_config(name | beside) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"factor": None}, "lacks factor"),
        ({"factor": 0}, "number factor, above 0, got 0"),
        ({"factor": "8"}, "number factor, above 0, got '8'"),
        ({"factor": float("inf")}, "number factor, above 0, got inf"),
        ({"high_freq_factor": 1.0}, "low_freq_factor 1.0 must be below high_freq_factor 1.0"),
        ({"original_max_position_embeddings": 0.5}, "whole number original_max_position_emb"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embedding is not supported"),
        ({"rope_theta": "5e5"}, "number rope_theta, above 0, got '5e5'"),
        ({"rope_theta": 1}, "rope_theta must be above 1, got 1.0"),
        ({"truncate": "no"}, "truncate must be true or false, got 'no'"),
    ],
)
def test_rope_that_makes_no_sense(change, named):
    with pytest.raises(ValueError, match=named):
        target_config({"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3 | change})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16.0}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": 5}, "layer_types must be a list of names, got 5"),
        ({"partial_rotary_factor": 1e308}, r"partial_rotary_factor 1e\+308 must rotate"),
        ({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1e308}},
         r"partial_rotary_factor 1e\+308 must turn some"),
        ({"head_dim": 0}, "head_dim must be a whole number from 1"),
        ({"quantization_config": 5}, "quantization_config must be an object, got 5"),
    ],
)  # fmt: skip
def test_hostile_values_of_a_hybrid(change, named):
    with pytest.raises(ValueError, match=named):
        target_config({"architectures": ["Qwen3_5ForCausalLM"]} | change)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_null_kv_heads_are_all_heads(family):
    given = {"num_attention_heads": 16, "num_key_value_heads": None}
    assert CLASSES[family](**given).num_key_value_heads == 16
    config = target_config({"architectures": [NAMES[family]]} | given)
    assert {(mixer.num_heads, mixer.num_kv_heads) for mixer in config.mixers} == {(16, 16)}


def test_null_kv_heads_of_a_drafter_are_all_heads():
    raw = published("Qwen3-4B")
    given = drafter_config(raw | {"num_key_value_heads": None, "num_attention_heads": 12})
    assert given.mixers[0].num_kv_heads == 12
    del raw["num_key_value_heads"]  # then they are those of the class
    assert drafter_config(raw).mixers[0].num_kv_heads == 32


def test_swish_is_silu():
    """By both names transformers makes the same function: torch's."""
    name = {"architectures": ["Qwen3ForCausalLM"]}
    assert target_config(name | {"hidden_act": "swish"}) == target_config(name)
    raw = published("Qwen3-4B")
    assert drafter_config(raw | {"hidden_act": "swish"}) == drafter_config(raw)
    with pytest.raises(ValueError, match="'gelu' is not supported, only 'silu' or 'swish'"):
        target_config(name | {"hidden_act": "gelu"})


def test_more_heads_than_columns():
    name = {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match="num_attention_heads 64 are more than hidden_size"):
        target_config(name | {"hidden_size": 32, "num_attention_heads": 64})


QWEN3 = target_config({"architectures": ["Qwen3ForCausalLM"]})
SCALED = ProportionalScaling(turning=4, factor=1.0)


@pytest.mark.parametrize(
    "config",
    [
        QWEN3.attending(*[{"rope": RopeConfig(theta=1e4, scaling=SCALED)}] * QWEN3.num_layers),
        QWEN3.attending(*[{"window": 64}] * QWEN3.num_layers),
        QWEN3.attending(*[{"scale": 1.0}] * QWEN3.num_layers),
        QWEN3.attending(*[{"sinks": True}] * QWEN3.num_layers),
        replace(QWEN3, logit_softcap=30.0),
        replace(QWEN3, embedding_scale=8.0),
        replace(QWEN3, embedding_norm=True),
        replace(QWEN3, logit_multiplier=0.5),
    ],
)
def test_what_config_json_would_not_say_is_not_written(config):
    assert target_config(to_hf_config(QWEN3, "float32")) == QWEN3
    with pytest.raises(ValueError, match="only models of Qwen3's shape"):
        to_hf_config(config, "float32")


@pytest.mark.parametrize("given", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_scaled_rope_is_written(given):
    """A drafter has its target's: transformers and this reader take from the file what was read."""
    name = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 5e5}
    config = target_config(name | {"rope_scaling": given})
    raw = to_hf_config(config, "float32")
    assert target_config(raw) == config
    theirs = transformers.Qwen3Config(**raw).rope_parameters
    assert theirs.items() >= (given | {"rope_theta": 5e5}).items()


# Layers, D, FFN, heads, KV heads, block, layer ids, L, RoPE's theta, positions
PUBLISHED = {
    "Qwen3-4B": (5, 2560, 9728, 32, 8, 16, [1, 9, 17, 25, 33], 36, 1000000, 40960),
    "Qwen3-8B": (5, 4096, 12288, 32, 8, 16, [1, 9, 17, 25, 33], 36, 1000000, 40960),
    "Qwen3-Coder-30B-A3B": (8, 2048, 6144, 32, 4, 16, [1, 12, 23, 34, 45], 48, 10000000, 262144),
    "Llama-3.1-8B": (5, 4096, 12288, 32, 8, 10, [1, 8, 15, 22, 29], 32, 500000, 131072),
}
# The shape that is timed, the parameters, and the id that masks. Coder's theta and positions are
# taken from its target; Llama's mask, with its theta, positions and vocabulary, likewise.
MEANT = {
    "Qwen3-4B": ("qwen3-4b", 537_427_200, 151669),
    "Qwen3-8B": ("qwen3-8b", 1_048_626_432, 151669),
    "Qwen3-Coder-30B-A3B": ("qwen3-coder-30b", 473_995_264, 151669),
    "Llama-3.1-8B": ("llama-3.1-8b", 1_048_626_432, 128002),
}


def published(name: str) -> dict:
    layers, width, ffn, heads, kv_heads, block, ids, targets, theta, positions = PUBLISHED[name]
    llama = name.startswith("Llama")
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": block,
        "dflash_config": {"mask_token_id": MEANT[name][2], "target_layer_ids": ids},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ffn,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": positions,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": targets,
        "rms_norm_eps": 1e-6,
        "rope_scaling": LLAMA3 if llama else None,
        "rope_theta": theta,
        "sliding_window": None,
        "tie_word_embeddings": not llama,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 128256 if llama else 151936,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters(name):
    layers, width, ffn, heads, kv_heads, block, ids, targets, theta, _ = PUBLISHED[name]
    shape, parameters, mask = MEANT[name]
    got = drafter_config(published(name)).meeting(model_shape(shape).target)
    assert (got.num_layers, got.hidden_size, got.intermediate_size) == (layers, width, ffn)
    assert (got.mixers[0].num_heads, got.mixers[0].num_kv_heads, got.mixers[0].head_dim) == (
        heads,
        kv_heads,
        128,
    )
    assert (got.block_size, got.num_target_layers) == (block, targets)
    assert (
        got.target_layer_ids == tuple(ids) and got.mixers[0].qk_norm and not got.mixers[0].qkv_bias
    )
    assert (got.mask_token_id, got.mixers[0].rope.theta) == (mask, theta)
    assert got == replace(model_shape(shape).drafter, mask_token_id=mask)
    assert weight_bytes([got]) // 4 == parameters
    shapes = {s.name: s.shape for parts in leaf_sources(got, dflash.NAMES).values() for s in parts}
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
    for cap in (0, -20.0):  # dflash 0.1.0 caps above 0 only
        got = drafter_config(raw | {"dflash_config": own | {"final_logit_softcapping": cap}})
        assert got.final_logit_softcapping is None


WINDOWED = "sliding_attention"
REFUSED_DRAFTERS = [
    ({"architectures": ["DFlash3DraftModel"]}, "DFlash3DraftModel"),
    ({"architectures": ["DFlash2DraftModel"]}, "lacks conv_kernel_size, conv_group_size"),
    ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, "use_sliding_window"),
    ({"layer_types": ["sliding_attention"] * 5, "use_sliding_window": True}, "sliding_window must"),
    (
        {"sliding_window": 2**40, "use_sliding_window": True, "layer_types": [WINDOWED] * 5},
        "sliding_window must be a whole number from 1 to 2147483647, got 1099511627776",
    ),
    ({"layer_types": ["full_attention"] * 4}, "layer_types must be 5"),
    ({"layer_types": ["chunked_attention"] * 5}, "layer_types .*chunked_attention"),
    ({"rope_scaling": {"type": "longrope", "factor": 64.0}}, "'longrope'"),
    ({"rope_scaling": {"type": "linear"}}, "number factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "of full_attention"),
    ({"quantization_config": {"quant_method": "exl2"}}, r"quantization_config \(exl2\)"),
    ({"is_causal": "yes"}, "is_causal must be true or false"),
    ({"dflash_config": {"is_causal": False, "mask_token_id": 3}}, "says is_causal: put it at the"),
    ({"num_target_layers": None}, "num_target_layers"),
    ({"dflash_config": {"num_target_layers": 36}, "num_target_layers": None}, "num_target_layers"),
    (
        {"num_target_layers": "36"},
        "num_target_layers must be a whole number from 1 to 1024, got '36'",
    ),
    ({"dflash_config": [1]}, r"dflash_config must be an object, got \[1\]"),
    (
        {"dflash_config": {"block_size": 8.5}},
        "block_size must be a whole number from 0 to 1024, got 8.5",
    ),
    ({"target_layer_ids": 5}, "target_layer_ids must be a list of whole numbers, got 5"),
    ({"dflash_config": {"target_layer_ids": [1, "9"]}}, "target_layer_ids must be a list of"),
    ({"input_embedding_scale": float("nan")}, "input_embedding_scale must be a number, got nan"),
    ({"output_multiplier": "2"}, "output_multiplier must be a number, got '2'"),
    ({"layer_types": 5}, "layer_types must be a list of names, got 5"),
    ({"max_window_layers": "2"}, "max_window_layers must be a whole number"),
    ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
    ({"rope_parameters": [1e6]}, "rope_parameters must be an object"),
    ({"quantization_config": "awq"}, "quantization_config must be an object, got 'awq'"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number above 0, got '1e-6'"),
    ({"attention_bias": "false"}, "attention_bias must be true or false, got 'false'"),
    ({"architectures": 5}, "architectures must be a list of names, got 5"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED_DRAFTERS)
def test_drafters_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        drafter_config(published("Qwen3-4B") | change)


def test_the_head_of_a_plain_drafter_is_its_targets():
    """Another vocabulary is refused before tensors are looked for, its target's is no change."""
    raw = published("Qwen3-4B")
    same = drafter_config(raw | {"draft_vocab_size": raw["vocab_size"]})
    assert same == drafter_config(raw) and not same.has_head
    for size, named in ((32000, "draft_vocab_size 32000: of dflash's"), ("7", "whole number")):
        with pytest.raises(ValueError, match=named):
            drafter_config(raw | {"draft_vocab_size": size})


OPTIONAL = ("block_size", "input_embedding_scale", "output_multiplier", "rms_norm_eps")
OPTIONAL += ("final_logit_softcapping", "target_layer_ids", "dflash_config", "attention_bias")
OPTIONAL += ("layer_types", "max_window_layers", "use_sliding_window", "is_causal", "head_dim")


@pytest.mark.parametrize("key", OPTIONAL)
def test_null_is_as_good_as_absent(key):
    raw = published("Qwen3-4B") | published("Qwen3-4B")["dflash_config"]
    raw |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    for place in (raw, raw["dflash_config"]):
        place.pop(key, None)
    want = drafter_config(raw)
    assert drafter_config(raw | {key: None}) == want
    if key != "dflash_config":
        own = raw.get("dflash_config", {}) | {key: None}
        assert drafter_config(raw | {"dflash_config": own}) == want


@pytest.mark.parametrize(
    "name",
    [
        *("GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3nForCausalLM"),
        *(
            "Glm4vForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "DeepseekV3ForCausalLM",
        ),
        *("MinistralForCausalLM", "DFlashDraftModel"),
    ],
)
def test_targets_refused_by_name(name):
    with pytest.raises(ValueError, match=f"unsupported target {name}"):
        target_config({"architectures": [name]})


def test_a_config_names_one_architecture():
    with pytest.raises(ValueError, match=r"a list of names, got \[5\]"):
        target_config({"architectures": [5]})
    for names in ([], None, ["Qwen3ForCausalLM", "LlamaForCausalLM"]):
        with pytest.raises(ValueError, match="one architecture"):
            target_config({"architectures": names})
