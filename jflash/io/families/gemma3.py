"""Gemma 3, the text model: windows in most layers, sandwich norms of 1 + w, scaled embeddings.

Layers with a window and those without have a RoPE each. The vision models hold the same layers.
"""

from dataclasses import replace
from typing import Any

from jflash.io.families.trunk import TENSORS, read_sizes, refuse
from jflash.io.hf_rope import rope_by_kind
from jflash.io.hf_values import SIZE, checked, shown
from jflash.io.names import ROTARY
from jflash.records.config import TargetConfig

ARCHITECTURE, MODEL_TYPE = "Gemma3ForCausalLM", "gemma3_text"
SEEING = "Gemma3ForConditionalGeneration"
UNREAD = {
    "image_token_index": 262144
}  # of the vision model, whose class calls it image_token_id too
DEFAULTS: dict[str, Any] = (
    {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    | {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216}
    | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"head_dim": 256, "max_position_embeddings": 131072, "attention_bias": False}
    | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6}
    | {"use_bidirectional_attention": False}
)
WINDOWED, FULL = LAYER_TYPES = ("sliding_attention", "full_attention")
THETAS = {WINDOWED: 1e4, FULL: 1e6}
_OPTIONAL = ("final_logit_softcapping", "attn_logit_softcapping", "layer_types", *UNREAD, *(
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "image_token_id",
))  # fmt: skip
NORMS = {
    "input_norm/scale": ("input_layernorm.weight",),
    "attention_norm/scale": ("post_attention_layernorm.weight",),
    "mlp_input_norm/scale": ("pre_feedforward_layernorm.weight",),
    "mlp_norm/scale": ("post_feedforward_layernorm.weight",),
}
# Published vision models put language_model first, files of transformers 5 after `model`.
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)
NAMES = replace(
    TENSORS,
    every=NORMS,
    prefixes=PREFIXES,
    dropped=rf"{ROTARY}|(model\.)?(vision_tower|multi_modal_projector)\..*",
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Gemma 3."""
    value = DEFAULTS | checked(raw, (*DEFAULTS, *_OPTIONAL))
    refuse(value, attn_logit_softcapping=(None,), use_bidirectional_attention=(False,))
    kinds = layer_types(value, value["sliding_window_pattern"])
    image = value.get("image_token_id", value.get("image_token_index"))
    config = TargetConfig.alike(
        **read_sizes(value),
        **common(value),
        rope=None,
        scale=value["query_pre_attn_scalar"] ** -0.5,
        norm_shift=1.0,
        unread_ids=() if image is None else (image,),
    )
    if value.get("rope_parameters") and value.get("rope_scaling"):
        raise ValueError("rope_scaling beside rope_parameters is not supported: keep one of them")
    ropes = rope_by_kind(value, _ropes(value), {kind: value["head_dim"] for kind in LAYER_TYPES})
    windows = {WINDOWED: window(value), FULL: None}
    return config.attending(*[{"rope": ropes[kind], "window": windows[kind]} for kind in kinds])


def window(value: dict[str, Any]) -> int:
    """The window of the layers that have one."""
    if not SIZE.holds(value["sliding_window"]):
        shape = f"sliding_window must be {SIZE.words}"
        raise ValueError(f"{shape}, got {shown(value['sliding_window'])}")
    return value["sliding_window"]


def common(value: dict[str, Any]) -> dict[str, Any]:
    """TargetConfig's fields that Gemma 3 and Gemma 4 share."""
    bias, cap = value["attention_bias"], value.get("final_logit_softcapping")
    if cap is not None and cap <= 0:
        raise ValueError(f"final_logit_softcapping must be above 0, got {cap}")
    refuse(value, hidden_activation=("gelu_pytorch_tanh",))
    return dict(
        tie_embeddings=value["tie_word_embeddings"],
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        activation="gelu_tanh",
        sandwich=True,
        embedding_scale=value["hidden_size"] ** 0.5,
        logit_softcap=None if cap is None else float(cap),
    )


def layer_types(value: dict[str, Any], every: int) -> list[str]:
    """The kind of each layer; without a list every so many layers has no window."""
    count = value["num_hidden_layers"]
    types = value.get("layer_types") or [LAYER_TYPES[(i + 1) % every == 0] for i in range(count)]
    if len(types) != count or not set(types) <= set(LAYER_TYPES):
        raise ValueError(
            f"layer_types must be {count} of {' or '.join(LAYER_TYPES)}, got {shown(types)}"
        )
    return types


def _ropes(value: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The RoPE of each kind by the keys of older files, whose scaling is for full layers."""
    local, theta = value.get("rope_local_base_freq"), value.get("rope_theta")
    return {
        WINDOWED: {"rope_theta": local or THETAS[WINDOWED]},
        FULL: {"rope_theta": theta or THETAS[FULL]} | (value.get("rope_scaling") or {}),
    }
