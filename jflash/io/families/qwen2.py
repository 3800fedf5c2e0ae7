"""Qwen2 and Qwen2.5: queries, keys and values have biases, and `attention_bias` is ignored."""

from typing import Any

from jflash.io.families.trunk import COMMON, TENSORS, all_heads, read_target, refuse_windows
from jflash.records.config import TargetConfig

ARCHITECTURE, MODEL_TYPE = "Qwen2ForCausalLM", "qwen2"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"head_dim": None, "max_position_embeddings": 32768}
)
NAMES = TENSORS


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Qwen2."""
    biases = dict(qkv_bias=True, out_bias=False)
    config = read_target(all_heads(raw, DEFAULTS), DEFAULTS, qk_norm=False, **biases)
    refuse_windows(raw, config.num_layers)
    return config
