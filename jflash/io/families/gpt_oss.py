"""gpt-oss 20b and 120b: attention sinks, windows in every second layer, and clamped experts.

Published files hold the experts in MXFP4, transformers' in [E, in, out]; in both gate and up take
turns. The experts' activation is fixed: another alpha than 1.702 or limit than 7 is refused.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from jflash.io.families.trunk import ATTENTION, COMMON, TENSORS, read_trunk, refuse, renamed
from jflash.io.hf_values import SIZE, checked, shown
from jflash.records.config import TargetConfig
from jflash.records.specs import AttentionSpec, LayerConfig, MoeSpec

ARCHITECTURE, MODEL_TYPE = "GptOssForCausalLM", "gpt_oss"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880}
    | {"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True}
    | {"sliding_window": 128}
)
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
LAYER_TYPES = ("sliding_attention", "full_attention")
_EXPERTS = {
    "mlp/router/kernel": ("mlp.router.weight",),
    "mlp/router/bias": ("mlp.router.bias",),
    "mlp/gate_up/kernel": ("mlp.experts.gate_up_proj",),
    "mlp/gate_up/bias": ("mlp.experts.gate_up_proj_bias",),
    "mlp/down/kernel": ("mlp.experts.down_proj",),
    "mlp/down/bias": ("mlp.experts.down_proj_bias",),
}


def taking_turns(layer: LayerConfig) -> Int[np.ndarray, " C"]:
    """Order that takes columns of gate and up in turn to all of the gate's, then all of up's."""
    return np.arange(2 * layer.mlp.intermediate_size).reshape(-1, 2).T.reshape(-1)


NAMES = replace(
    TENSORS,
    mixers={AttentionSpec: ATTENTION | {"attention/sinks": ("self_attn.sinks",)}},
    mlps={MoeSpec: _EXPERTS},
    inputs_first=True,
    orders={f"mlp/gate_up/{x}": taking_turns for x in ("kernel", "bias")},
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a gpt-oss."""
    refuse(raw, swiglu_alpha=(None, 1.702), swiglu_limit=(None, 7))
    raw = renamed(raw, "num_experts", "num_local_experts")
    given = checked(raw, (*DEFAULTS, "layer_types"))
    # An empty rope_parameters means a plain RoPE, as to transformers; an absent one YaRN.
    if "rope_parameters" not in given and not given.get("rope_scaling"):
        given["rope_parameters"] = ROPE
    trunk, value = read_trunk({"rope_theta": 150000.0} | given, DEFAULTS)
    bias, window = value["attention_bias"], raw.get("sliding_window", DEFAULTS["sliding_window"])
    config = TargetConfig.alike(
        **trunk,
        tie_embeddings=value["tie_word_embeddings"],
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        norm_dtype="float32",
    )
    types = _layer_types(value, config.num_layers)
    if LAYER_TYPES[0] in types and not SIZE.holds(window):
        raise ValueError(f"sliding_window must be {SIZE.words}, got {shown(window)}")
    windows = [{"window": window if kind == LAYER_TYPES[0] else None} for kind in types]
    experts = MoeSpec(
        num_experts=value["num_local_experts"],
        experts_per_token=value["num_experts_per_tok"],
        intermediate_size=value["intermediate_size"],
        renormalise=True,
        scores="softmax of the chosen",
        clamped=True,
        bias=True,
    )
    return config.attending(*windows).with_experts(experts, range(config.num_layers))


def _layer_types(value: dict[str, Any], count: int) -> list[str]:
    """The kind of each layer: config.json's list, else windows in even layers."""
    types = value.get("layer_types", [LAYER_TYPES[i % 2] for i in range(count)])
    if len(types) != count or not set(types) <= set(LAYER_TYPES):
        raise ValueError(
            f"layer_types must be {count} of {' or '.join(LAYER_TYPES)}, got {shown(types)}"
        )
    return types
