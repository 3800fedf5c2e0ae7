"""config.json of published targets: the shapes to time, and what has no shape.

Written by hand, no file was fetched; numbers of parameters tell a wrong size.
"""

from dataclasses import replace

import pytest

from jflash.bench.floors import Rates, floor_seconds, verify_work
from jflash.bench.shapes import model_shape, quantised
from jflash.compiled.shape import Shape
from jflash.io.hf_config import target_config
from jflash.memory import memory_budget, weight_bytes
from jflash.models.decoder import Target
from jflash.pair import Models
from jflash.records.config import TargetConfig
from jflash.records.specs import RopeConfig
from tests.io.test_hf_config import LLAMA3

QWEN = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN2 = QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
}
PUBLISHED = {
    "Qwen3-8B": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "Qwen3-4B": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen2.5-7B-Instruct": QWEN2
    | {"hidden_size": 3584, "intermediate_size": 18944, "tie_word_embeddings": False}
    | {"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4}
    | {"max_window_layers": 28, "sliding_window": 131072, "vocab_size": 152064},
    "Qwen2.5-0.5B-Instruct": QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "tie_word_embeddings": True}
    | {"num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2}
    | {"max_window_layers": 21, "sliding_window": 32768, "vocab_size": 151936},
    "Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen3-4B", "qwen3-4b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ],
)
def test_the_shapes_to_time_are_the_published_ones(name, shape):
    assert target_config(PUBLISHED[name]) == model_shape(shape).target


@pytest.mark.parametrize(
    ("name", "head_dim", "entries"),
    [("Qwen2.5-7B-Instruct", 128, 7_615_616_512), ("Qwen2.5-0.5B-Instruct", 64, 494_032_768)],
)
def test_qwen2_has_biases_and_its_heads_share_the_width(name, head_dim, entries):
    """The entries are those that the hub shows of the weights."""
    got = target_config(PUBLISHED[name])
    assert weight_bytes([got]) // 4 == entries
    assert (
        got.mixers[0].qkv_bias,
        got.mixers[0].out_bias,
        got.layers[0].mlp.bias,
        got.mixers[0].qk_norm,
    ) == (True, False, False, False)
    assert (
        got.mixers[0].num_heads * got.mixers[0].head_dim == got.hidden_size
        and got.mixers[0].head_dim == head_dim
    )
    assert got.mixers[0].rope == RopeConfig(theta=1e6, scaling=None)


GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128,
    "partial_rotary_factor": 0.5, "rope_theta": 1000000,
}  # fmt: skip
# As stated, where transformers' defaults are others: none of these files could be opened. Then the
# billions of parameters that the models' cards give, all and a token's (without a head of its
# own), and bytes of a token's keys and values in layers without a window.
UNSEEN = {
    "qwen3-coder-next": (
        {"architectures": ["Qwen3NextForCausalLM"], "rope_theta": 10000000}
        | {"max_position_embeddings": 262144},
        80, 3, 12 * 2 * (2 * 256) * 2,
    ),
    "gemma-4-12b": (
        {
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma4_unified_text", "hidden_size": 3840,
                "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
                "num_key_value_heads": 8, "num_global_key_value_heads": 1,
                "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
            },
        },
        11.95, 11.95, 8 * 2 * (1 * 512) * 2,
    ),
    "mistral-7b": (
        {"architectures": ["MistralForCausalLM"], "vocab_size": 32768, "sliding_window": None}
        | {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "max_position_embeddings": 32768},
        7.248, 7.248, 32 * 2 * (8 * 128) * 2,
    ),
    "glm-4-32b": (
        {"architectures": ["Glm4ForCausalLM"], "hidden_size": 6144, "intermediate_size": 23040}
        | {"num_hidden_layers": 61, "num_attention_heads": 48, "rms_norm_eps": 1e-5}
        | {"attention_bias": False, "rope_theta": 10000.0, "max_position_embeddings": 32768},
        32.57, 31.6, 61 * 2 * (2 * 128) * 2,
    ),
    "minimax-m2": (
        {"architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 64},
        229, 10, 62 * 2 * (8 * 128) * 2,
    ),
    "glm-4.5-air": (GLM, 106, 12, 46 * 2 * (8 * 128) * 2),
    "glm-4.6": (
        GLM
        | {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92}
        | {"first_k_dense_replace": 3, "n_routed_experts": 160, "moe_intermediate_size": 1536}
        | {"use_qk_norm": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 202752}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        355, 32, 92 * 2 * (8 * 128) * 2,
    ),
}  # fmt: skip


def plain(target: TargetConfig) -> Models:
    return Models(Target(replace(target, dtype="bfloat16")), None, 1)


@pytest.mark.parametrize("name", UNSEEN)
def test_shapes_of_files_that_could_not_be_opened(name):
    """Their sizes, the memory that they take and the floor of a token, by what is stated of them.

    A card rounds, and some count layers that predict more tokens, which are not read.
    """
    raw, billions, active, token = UNSEEN[name]
    target, drafter = model_shape(name)
    assert replace(target_config(raw), unread_ids=()) == target  # a shape reads no prompts
    assert drafter.hidden_size == target.hidden_size and drafter.vocab_size == target.vocab_size
    assert all(0 <= id < target.num_layers for id in drafter.target_layer_ids)
    short, long = (memory_budget(plain(target), Shape(1, n, 128, 1)) for n in (2048, 4096))
    assert short.weights / 2e9 == pytest.approx(billions, rel=0.01)
    assert (long.caches - short.caches) / 2048 == pytest.approx(token, rel=1e-3)
    one = verify_work(plain(target).target.config, 1, 1, 1024.0)
    head = 0 if target.tie_embeddings else target.vocab_size * target.hidden_size / 1e9
    assert one.weight_bytes / 2e9 - head == pytest.approx(active, rel=0.09)
    kept = 1025 * token
    if name == "gemma-4-12b":
        kept += 1024 * 40 * 2 * (8 * 256) * 2  # keys older than the window are not read
    if name == "qwen3-coder-next":
        kept += 36 * 32 * 128 * 128 * 4 * (1 + 1 / 16)  # states
    assert one.attention_bytes == kept
    assert floor_seconds(one, Rates(1e12, 1e18)) == pytest.approx(one.bytes / 1e12)


def test_coder_next_in_fp8_fits_an_h200():
    """160 GB in bfloat16, so only kept. Its 48 layers are 12 times the same four."""
    target = model_shape("qwen3-coder-next").target
    four, eight = (quantised(replace(target, layers=target.layers[:n]), "fp8") for n in (4, 8))
    one, two = (memory_budget(plain(x), Shape(1, 8192, 128, 1)) for x in (four, eight))
    weights, caches = (a + 11 * (b - a) for a, b in zip(one[:2], two[:2], strict=True))
    assert 0 < two.weights - one.weights < 0.55 * 159.3e9 / 12
    assert weights + caches + two.temporaries < 0.92 * 141e9
