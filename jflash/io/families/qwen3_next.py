"""Qwen3-Next and Qwen3-Coder-Next: the hybrid whose delta nets are stored by key head."""

from typing import Any

from jflash.config import TargetConfig
from jflash.io.families import qwen3_5, qwen3_5_moe
from jflash.io.hf_values import checked

ARCHITECTURE, MODEL_TYPE = "Qwen3NextForCausalLM", "qwen3_next"
DEFAULTS: dict[str, Any] = (
    qwen3_5.HYBRID
    | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632}
    | {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2}
    | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []}
)
# These tensors replace qwen3_5's: each has its parts (q, k, v, z; b, a) key head by key head.
INPUTS = ["linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"]


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Qwen3-Next."""
    value = DEFAULTS | checked(raw, DEFAULTS)
    config = qwen3_5.read(raw, DEFAULTS)
    step, dense = value["decoder_sparse_step"], value["mlp_only_layers"]
    layers = range(config.num_layers)
    sparse = [i for i in layers if value["num_experts"] and i not in dense and (i + 1) % step == 0]
    if not sparse:
        return config
    return config.with_experts(qwen3_5_moe.experts(value, value["norm_topk_prob"]), sparse)
