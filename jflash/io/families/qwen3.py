"""Qwen3, dense: queries and keys are normalised by head."""

from typing import Any

from jflash.io.families.trunk import COMMON, TENSORS, all_heads, read_target, refuse_windows
from jflash.io.hf_values import checked
from jflash.records.config import TargetConfig

ARCHITECTURE, MODEL_TYPE = "Qwen3ForCausalLM", "qwen3"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"head_dim": 128, "max_position_embeddings": 32768, "attention_bias": False}
)
NAMES = TENSORS


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Qwen3."""
    return read(all_heads(raw, DEFAULTS), DEFAULTS)


def read(raw: dict[str, Any], defaults: dict[str, Any]) -> TargetConfig:
    """The config of Qwen3's layers with dense MLPs, which Qwen3-MoE then replaces."""
    bias = (defaults | checked(raw, defaults))["attention_bias"]
    config = read_target(raw, defaults, qk_norm=True, qkv_bias=bias, out_bias=bias)
    refuse_windows(raw, config.num_layers)
    return config
