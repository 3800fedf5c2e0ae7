"""Mistral 7B: Llama's layers without biases. Windows are refused, the default one included."""

from typing import Any

from jflash.io.families.trunk import COMMON, TENSORS, read_target
from jflash.io.hf_values import shown
from jflash.records.config import TargetConfig

ARCHITECTURE, MODEL_TYPE = "MistralForCausalLM", "mistral"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": None, "max_position_embeddings": 131072, "sliding_window": 4096}
)
NAMES = TENSORS


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Mistral; null means no window, an absent key transformers' 4,096 tokens."""
    window = raw.get("sliding_window", DEFAULTS["sliding_window"])
    if window is not None:
        raise ValueError(f"sliding_window {shown(window)}: targets with windows are not supported")
    return read_target(raw, DEFAULTS, qk_norm=False, qkv_bias=False, out_bias=False)
