"""config.json of published dense targets, whole: the shapes to time, and what has no shape.

Written by hand, no file was fetched; numbers of parameters tell a wrong size.
"""

import pytest

from jflash.bench.shapes import model_shape
from jflash.io.hf_config import target_config
from jflash.memory import weight_bytes
from jflash.specs import RopeConfig
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
