"""Qwen3.5-MoE (35B-A3B and larger): every layer of the hybrid has experts and a shared expert."""

from dataclasses import replace
from typing import Any

from jflash.io.families import qwen3_5, qwen3_moe
from jflash.io.hf_values import checked
from jflash.records.config import TargetConfig
from jflash.records.specs import MoeSpec

ARCHITECTURE, MODEL_TYPE = "Qwen3_5MoeForCausalLM", "qwen3_5_moe"
SEEING, UNREAD = "Qwen3_5MoeForConditionalGeneration", qwen3_5.UNREAD
DEFAULTS: dict[str, Any] = (
    qwen3_5.HYBRID
    | {"vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 512}  # dense: no layer
    | {"num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2}
    | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512}
)
SHARED = {
    "mlp/shared_gate/kernel": ("mlp.shared_expert_gate.weight",),
    "mlp/shared_gate_up/kernel": tuple(
        f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up")
    ),
    "mlp/shared_down/kernel": ("mlp.shared_expert.down_proj.weight",),
}
NAMES = replace(
    qwen3_5.NAMES,
    mlps=qwen3_5.NAMES.mlps | {MoeSpec: qwen3_moe.EXPERTS | SHARED},
    stacked=qwen3_moe.STACKED,
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Qwen3.5-MoE."""
    value = DEFAULTS | checked(raw, DEFAULTS)
    config = qwen3_5.read(raw, DEFAULTS)
    return config.with_experts(experts(value, True), range(config.num_layers))


def experts(value: dict[str, Any], renormalise: bool) -> MoeSpec:
    """The experts of a layer, with the shared one."""
    return MoeSpec(
        num_experts=value["num_experts"],
        experts_per_token=value["num_experts_per_tok"],
        intermediate_size=value["moe_intermediate_size"],
        renormalise=renormalise,
        shared_size=value["shared_expert_intermediate_size"],
    )
