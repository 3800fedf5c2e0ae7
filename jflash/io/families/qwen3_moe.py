"""Qwen3-MoE: Qwen3 with experts in place of the MLP of some layers."""

from dataclasses import replace
from typing import Any

from jflash.io.families import qwen3
from jflash.io.families.trunk import COMMON
from jflash.io.hf_values import checked
from jflash.records.config import TargetConfig
from jflash.records.specs import MoeSpec

ARCHITECTURE, MODEL_TYPE = "Qwen3MoeForCausalLM", "qwen3_moe"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"head_dim": None, "max_position_embeddings": 32768, "attention_bias": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
)
EXPERTS = {
    "mlp/router/kernel": ("mlp.gate.weight",),
    "mlp/gate_up/kernel": ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
    "mlp/down/kernel": ("mlp.experts.{e}.down_proj.weight",),
}
STACKED = {
    "mlp/gate_up/kernel": ("mlp.experts.gate_up_proj",),
    "mlp/down/kernel": ("mlp.experts.down_proj",),
}
NAMES = replace(qwen3.NAMES, mlps=qwen3.NAMES.mlps | {MoeSpec: EXPERTS}, stacked=STACKED)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Qwen3-MoE."""
    value = DEFAULTS | checked(raw, (*DEFAULTS, "num_local_experts"))
    # transformers' class has one window for all layers or none, whatever else the config says.
    config = qwen3.read(raw | {"max_window_layers": 0, "layer_types": None}, DEFAULTS)
    experts = value.get("num_local_experts", value["num_experts"])
    step, dense = value["decoder_sparse_step"], value["mlp_only_layers"]
    layers = range(value["num_hidden_layers"])
    sparse = tuple(i for i in layers if experts and i not in dense and (i + 1) % step == 0)
    if not sparse:
        return config
    moe = MoeSpec(
        num_experts=experts,
        experts_per_token=value["num_experts_per_tok"],
        intermediate_size=value["moe_intermediate_size"],
        renormalise=value["norm_topk_prob"],
    )
    return config.with_experts(moe, sparse)
