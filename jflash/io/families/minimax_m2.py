"""MiniMax-M2, M2.5 and M2.7: experts chosen by sigmoids, queries and keys normed over all heads."""

from dataclasses import replace
from typing import Any

from jflash.io.families.trunk import COMMON, TENSORS, read_trunk, refuse, renamed
from jflash.io.hf_values import checked
from jflash.records.config import TargetConfig
from jflash.records.specs import MoeSpec

ARCHITECTURE, MODEL_TYPE = "MiniMaxM2ForCausalLM", "minimax_m2"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536}
    | {"num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8}
    | {"head_dim": 128, "max_position_embeddings": 196608, "partial_rotary_factor": 1.0}
    | {"num_local_experts": 256, "num_experts_per_tok": 8}
)
_MOE = "block_sparse_moe"
NAMES = replace(
    TENSORS,
    mlps={
        MoeSpec: {
            "mlp/routes": (f"{_MOE}.gate.weight",),
            "mlp/correction": (f"{_MOE}.e_score_correction_bias",),
            "mlp/gate_up/kernel": tuple(f"{_MOE}.experts.{{e}}.{w}.weight" for w in ("w1", "w3")),
            "mlp/down/kernel": (f"{_MOE}.experts.{{e}}.w2.weight",),
        }
    },
    dropped=rf"{TENSORS.dropped}|mtp\..*",
    predicting=True,
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a MiniMax-M2.

    Published files give the rotated dims of a head as `rotary_dim`, which transformers 5.15.0
    ignores: it rotates whole heads then.
    """
    refuse(raw, scoring_func=(None, "sigmoid"))
    raw = renamed(raw, "num_experts", "num_local_experts")
    given = checked(raw, (*DEFAULTS, "rotary_dim"))
    if "rotary_dim" in given and "partial_rotary_factor" not in given:
        head_dim = given.get("head_dim", DEFAULTS["head_dim"])
        given["partial_rotary_factor"] = given["rotary_dim"] / head_dim
    trunk, value = read_trunk({"rope_theta": 5e6} | given, DEFAULTS)
    config = TargetConfig.alike(
        **trunk, tie_embeddings=value["tie_word_embeddings"], qk_norm=True, norm_all_heads=True
    )
    experts = MoeSpec(
        num_experts=value["num_local_experts"],
        experts_per_token=value["num_experts_per_tok"],
        intermediate_size=value["intermediate_size"],
        renormalise=True,
        scores="sigmoid",
    )
    return config.with_experts(experts, range(config.num_layers))
