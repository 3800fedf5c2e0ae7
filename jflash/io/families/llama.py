"""Llama: its layers have no windows, and keys for windows in config.json are ignored."""

from typing import Any

from jflash.io.families.trunk import COMMON, TENSORS, read_target
from jflash.io.hf_values import checked
from jflash.records.config import TargetConfig

ARCHITECTURE, MODEL_TYPE = "LlamaForCausalLM", "llama"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None}
    | {"head_dim": None, "max_position_embeddings": 2048, "attention_bias": False}
    | {"mlp_bias": False}
)
NAMES = TENSORS


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Llama."""
    value = DEFAULTS | checked(raw, DEFAULTS)
    bias, mlp_bias = value["attention_bias"], value["mlp_bias"]
    biases = dict(qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    return read_target(raw, DEFAULTS, qk_norm=False, **biases)
