"""GLM-4.5, 4.6 and 4.7: experts chosen by sigmoids within groups, and shared ones for all."""

from dataclasses import replace
from typing import Any

from jflash.io.families.qwen3_moe import EXPERTS, STACKED
from jflash.io.families.trunk import COMMON, TENSORS, read_trunk, refuse, renamed
from jflash.records.config import TargetConfig
from jflash.records.specs import MoeSpec

ARCHITECTURE, MODEL_TYPE = "Glm4MoeForCausalLM", "glm4_moe"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944}
    | {"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8}
    | {"head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    | {"attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 0.5}
    | {"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1}
    | {"n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1, "norm_topk_prob": True}
)
_SHARED = "mlp.shared_experts"
_LEAVES = {
    "mlp/routes": ("mlp.gate.weight",),
    "mlp/correction": ("mlp.gate.e_score_correction_bias",),
    "mlp/shared_gate_up/kernel": tuple(f"{_SHARED}.{x}_proj.weight" for x in ("gate", "up")),
    "mlp/shared_down/kernel": (f"{_SHARED}.down_proj.weight",),
}
NAMES = replace(
    TENSORS,
    mlps=TENSORS.mlps | {MoeSpec: EXPERTS | _LEAVES},
    stacked=STACKED,
    predicting=True,
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a GLM-4 with experts."""
    refuse(raw, scoring_func=(None, "sigmoid"), topk_method=(None, "noaux_tc"))
    raw = renamed(raw, "num_local_experts", "n_routed_experts")
    trunk, value = read_trunk(raw, DEFAULTS)
    config = TargetConfig.alike(
        **trunk,
        tie_embeddings=value["tie_word_embeddings"],
        qkv_bias=value["attention_bias"],
        qk_norm=value["use_qk_norm"],
    )
    size = value["moe_intermediate_size"]
    experts = MoeSpec(
        num_experts=value["n_routed_experts"],
        experts_per_token=value["num_experts_per_tok"],
        intermediate_size=size,
        renormalise=value["norm_topk_prob"],
        shared_size=value["n_shared_experts"] * size or None,
        shared_gated=False,
        scores="sigmoid",
        groups=value["n_group"],
        kept_groups=value["topk_group"],
        scale=float(value["routed_scaling_factor"]),
    )
    first = value["first_k_dense_replace"]
    return config.with_experts(experts, range(first, config.num_layers))
