"""Qwen3.5, 3.6 and 3.8, dense: three gated delta nets for each gated attention, norms of 1 + w."""

from dataclasses import replace
from typing import Any

from jflash.io.families.trunk import ATTENTION, COMMON, TENSORS, read_trunk
from jflash.io.hf_values import checked, shown
from jflash.io.names import ROTARY
from jflash.records.config import TargetConfig
from jflash.records.specs import AttentionSpec, DeltaSpec

ARCHITECTURE, MODEL_TYPE = "Qwen3_5ForCausalLM", "qwen3_5"
SEEING = "Qwen3_5ForConditionalGeneration"  # the same text model with a vision tower
HYBRID: dict[str, Any] = (
    COMMON
    | {"head_dim": 256, "max_position_embeddings": 32768, "attention_bias": False}
    | {"partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
)
DEFAULTS: dict[str, Any] = (
    HYBRID
    | {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
    | {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
)
LAYER_TYPES = ("linear_attention", "full_attention")
UNREAD = {"image_token_id": 248056, "video_token_id": 248057}  # of the vision model
DELTA = {
    "attention/inputs/kernel": tuple(
        f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")
    ),
    "attention/conv": ("linear_attn.conv1d.weight",),
    "attention/a_log": ("linear_attn.A_log",),
    "attention/dt_bias": ("linear_attn.dt_bias",),
    "attention/norm/scale": ("linear_attn.norm.weight",),
    "attention/out/kernel": ("linear_attn.out_proj.weight",),
}
_WITH_GATE = ((0, 3), (1,), (2,))  # a gate beside the queries is part of their tensor
NAMES = replace(
    TENSORS,
    mixers={AttentionSpec: ATTENTION, DeltaSpec: DELTA},
    parts={"attention/qkv/kernel": _WITH_GATE, "attention/qkv/bias": _WITH_GATE},
    prefixes=(("model.language_model.", "model."),),
    dropped=rf"{ROTARY}|(model\.)?visual\..*|mtp\..*",  # vision; layers that predict more tokens
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a dense Qwen3.5."""
    return read(raw, DEFAULTS)


def read(raw: dict[str, Any], defaults: dict[str, Any]) -> TargetConfig:
    """The config of a hybrid with dense MLPs, which a caller may replace by experts."""
    trunk, value = read_trunk(raw, defaults)
    bias, seen = value["attention_bias"], checked(raw, (*UNREAD, "layer_types"))
    config = TargetConfig.alike(
        **trunk,
        tie_embeddings=value["tie_word_embeddings"],
        qk_norm=True,
        gated=True,
        qkv_bias=bias,
        out_bias=bias,
        norm_shift=1.0,
        unread_ids=tuple(seen[key] for key in UNREAD if key in seen),
    )
    delta = DeltaSpec(
        num_key_heads=value["linear_num_key_heads"],
        num_value_heads=value["linear_num_value_heads"],
        key_dim=value["linear_key_head_dim"],
        value_dim=value["linear_value_head_dim"],
        taps=value["linear_conv_kernel_dim"],
    )
    types = _layer_types(value, config.num_layers)
    return replace(
        config,
        layers=tuple(
            replace(layer, mixer=delta) if kind == "linear_attention" else layer
            for layer, kind in zip(config.layers, types, strict=True)
        ),
    )


def _layer_types(value: dict[str, Any], count: int) -> list[str]:
    """The kind of each layer: config.json's list, else by its `full_attention_interval`."""
    every = value["full_attention_interval"]
    types = value.get("layer_types", [LAYER_TYPES[(i + 1) % every == 0] for i in range(count)])
    if len(types) != count or not set(types) <= set(LAYER_TYPES):
        raise ValueError(
            f"layer_types must be {count} of {' or '.join(LAYER_TYPES)}, got {shown(types)}"
        )
    return types
