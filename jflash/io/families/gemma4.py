"""Gemma 4, dense, with experts beside the MLP, and unified: Gemma 3's layers with heads by kind.

Layers without a window have wider and fewer key heads, whose values are the keys. The vision models
hold the same layers. Models with per-layer embeddings (E2B, E4B) have other layers.
"""

from dataclasses import replace
from typing import Any

from jflash.io.families import gemma3
from jflash.io.families.gemma3 import FULL, WINDOWED
from jflash.io.families.trunk import read_sizes, refuse
from jflash.io.hf_rope import rope_by_kind
from jflash.io.hf_values import checked, shown
from jflash.io.names import ROTARY
from jflash.records.config import TargetConfig
from jflash.records.specs import AttentionSpec, MoeSpec

ARCHITECTURE, MODEL_TYPE = "Gemma4ForCausalLM", "gemma4_text"
SEEING = "Gemma4ForConditionalGeneration"
ALIKE = ("Gemma4UnifiedForConditionalGeneration",)  # 12B
# Of the vision models.
UNREAD = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
DEFAULTS: dict[str, Any] = (
    {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    | {"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216}
    | {"num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"head_dim": 256, "max_position_embeddings": 131072, "attention_bias": False}
    | {"sliding_window": 512, "attention_k_eq_v": False, "num_kv_shared_layers": 0}
    | {"use_double_wide_mlp": False, "enable_moe_block": False, "hidden_size_per_layer_input": 256}
)
UNIFIED = {"sliding_window": 1024, "max_position_embeddings": 262144}
UNIFIED |= {"hidden_size_per_layer_input": 0}
ROPES: dict[str, dict[str, Any]] = {
    WINDOWED: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_OPTIONAL = ("final_logit_softcapping", "layer_types", "rope_parameters", "global_head_dim")
_OPTIONAL += ("num_global_key_value_heads", "num_experts", "top_k_experts")
_OPTIONAL += ("moe_intermediate_size", "per_layer_config", *UNREAD)
EVERY = gemma3.NORMS | {
    "scalar": ("layer_scalar",),
    "dense_norm/scale": ("post_feedforward_layernorm_1.weight",),
    "experts_input_norm/scale": ("pre_feedforward_layernorm_2.weight",),
    "experts_norm/scale": ("post_feedforward_layernorm_2.weight",),
    "experts/router/kernel": ("router.proj.weight",),
    "experts/router_scale": ("router.scale",),
    "experts/expert_scale": ("router.per_expert_scale",),
    "experts/gate_up/kernel": tuple(f"experts.{{e}}.{x}_proj.weight" for x in ("gate", "up")),
    "experts/down/kernel": ("experts.{e}.down_proj.weight",),
}
NAMES = replace(
    gemma3.NAMES,
    every=EVERY,
    # As published; files of compressed-tensors have tensors of each expert.
    stacked={f"experts/{x}/kernel": (f"experts.{x}_proj",) for x in ("gate_up", "down")},
    shared_kv={f"attention/qkv/{x}": tuple(f"self_attn.{y}_proj.{z}" for y in "qk")
               for x, z in (("kernel", "weight"), ("bias", "bias"))},
    dropped=rf"{ROTARY}|(model\.)?(vision_tower|audio_tower|vision_embedder|embed_vision|embed_audio)\..*",
)  # fmt: skip


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Gemma 4."""
    unified = raw.get("model_type") == "gemma4_unified_text"
    value = DEFAULTS | (UNIFIED if unified else {}) | checked(raw, (*DEFAULTS, *_OPTIONAL))
    refuse(
        value, hidden_size_per_layer_input=(0,), num_kv_shared_layers=(0,),
        use_double_wide_mlp=(False,), use_bidirectional_attention=(None, "vision"),
        rope_scaling=(None, {}),  # its kinds of layers have a RoPE each, in rope_parameters
    )  # fmt: skip
    kinds = gemma3.layer_types(value, 6)
    kinds = [*kinds[:-1], FULL]  # as transformers does
    seen = (value.get(key) for key in UNREAD)
    config = TargetConfig.alike(
        **read_sizes(value),
        **gemma3.common(value),
        rope=None,
        scale=1.0,
        value_norm=True,
        norm_dtype="float32",
        unread_ids=tuple(id for id in seen if id is not None),
    )
    config = config.attending(*_mixers(value, kinds, config.mixers[0]))
    layers = [replace(x, scaled=True, beside=_experts(value)) for x in config.layers]
    return replace(config, layers=tuple(layers))


def _mixers(
    value: dict[str, Any], kinds: list[str], windowed: AttentionSpec
) -> list[dict[str, Any]]:
    """What differs between the layers' attention."""
    shared = value["attention_k_eq_v"]
    heads = value.get("num_global_key_value_heads") if shared else None
    full = {
        "head_dim": value.get("global_head_dim", 512),
        "num_kv_heads": heads or windowed.num_kv_heads,
    }
    given = value.get("per_layer_config")
    if given is not None:
        full = _given(given, kinds, windowed)
    ropes = rope_by_kind(value, ROPES, {WINDOWED: windowed.head_dim, FULL: full["head_dim"]})
    changes = {
        WINDOWED: {"rope": ropes[WINDOWED], "window": gemma3.window(value)},
        FULL: full | {"rope": ropes[FULL], "shared_kv": shared},
    }
    return [changes[kind] for kind in kinds]


def _given(given: dict[str, Any], kinds: list[str], windowed: AttentionSpec) -> dict[str, Any]:
    """The sizes of layers without a window in files of transformers 5.15: {"05": {…}, …}."""
    keys = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    usual = {"head_dim": windowed.head_dim, "num_key_value_heads": windowed.num_kv_heads}
    objects = all(type(each) is dict for each in given.values())
    sizes = [usual | checked(each, keys) for each in given.values()] if objects else []
    numbers = sorted(int(name) for name in given if name.isdecimal())
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    if (
        not objects
        or numbers != full
        or any(each != sizes[0] or each.keys() != keys.keys() for each in sizes)
    ):
        raise ValueError(
            f"per_layer_config must give the layers of {FULL} one head_dim and "
            f"num_key_value_heads, got {shown(given)}"
        )
    return {ours: sizes[0][key] for key, ours in keys.items()}


def _experts(value: dict[str, Any]) -> MoeSpec | None:
    """The experts beside the MLP of each layer; None for dense models."""
    if not value["enable_moe_block"]:
        return None
    needed = ("num_experts", "top_k_experts", "moe_intermediate_size")
    missing = [key for key in needed if not value.get(key)]
    if missing:
        raise ValueError(f"enable_moe_block needs {', '.join(missing)}")
    return MoeSpec(
        num_experts=value["num_experts"],
        experts_per_token=value["top_k_experts"],
        intermediate_size=value["moe_intermediate_size"],
        renormalise=True,
        activation="gelu_tanh",
    )
