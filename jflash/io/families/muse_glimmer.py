"""Muse-Glimmer, its text model: windows with RoPE in three of four layers, the fourth with neither.

Norms of 1 + w before and after attention and MLP, a gate on the heads' outputs, normed embeddings;
logits have a multiplier and a cap. All files hold the vision model too.
"""

from dataclasses import replace
from typing import Any

from jflash.io.families import gemma3
from jflash.io.families.gemma3 import FULL, LAYER_TYPES, WINDOWED
from jflash.io.families.trunk import ATTENTION, SILU, TENSORS, read_sizes, refuse
from jflash.io.hf_rope import rope_config
from jflash.io.hf_values import checked, shown
from jflash.io.names import ROTARY
from jflash.records.config import TargetConfig
from jflash.records.specs import AttentionSpec, RopeConfig

ARCHITECTURE, MODEL_TYPE = "MuseGlimmerForConditionalGeneration", "muse_glimmer"
SEEING = ARCHITECTURE
DEFAULTS: dict[str, Any] = (
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_activation": "silu"}
    | {"vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968}
    | {"num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2}
    | {"head_dim": 128, "max_position_embeddings": 131072, "attention_bias": False}
    | {"sliding_window": 2048, "final_logit_softcapping": 20.0, "post_norm_eps": 1e-8}
    | {"qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404}
)
UNREAD = {"image_token_id": 200092, "video_token_id": 200091}
_OPTIONAL = ("layer_types", "rope_parameters", "layer_rope_theta")
_INPUTS = tuple(f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "gate"))
NAMES = replace(
    TENSORS,
    every=gemma3.NORMS,
    mixers={AttentionSpec: ATTENTION | {"attention/qkv/kernel": _INPUTS}},
    orders={"attention/qkv/kernel": lambda layer: None},  # the gate is a tensor of its own
    whole=("norm/scale",),
    prefixes=(("model.language_model.", "model."),),
    dropped=rf"{ROTARY}|model\.vision_(tower|adapter|projection)\..*",
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Muse-Glimmer's text model."""
    value = DEFAULTS | UNREAD | checked(raw, (*DEFAULTS, *UNREAD, *_OPTIONAL))
    refuse(value, attention_bias=(False,), hidden_activation=SILU)
    for key in ("final_logit_softcapping", "output_multiplier"):
        if value[key] <= 0:
            raise ValueError(f"{key} must be above 0, got {value[key]}")
    sizes = read_sizes(value)
    rope = rope_config(raw, value["max_position_embeddings"], sizes["head_dim"])
    count = sizes["num_layers"]
    kinds = [LAYER_TYPES[(count - 1 - i) % 4 == 0] for i in range(count)]
    kinds = gemma3.layer_types({"layer_types": kinds} | value, 4)
    config = TargetConfig.alike(
        **sizes,
        rope=None,
        # The queries' factor comes after a norm without weights, and rotations keep it.
        scale=value["qk_scale_factor"] * sizes["head_dim"] ** -0.5,
        qk_norm=True,
        weightless=True,
        gated=True,
        sandwich=True,
        norm_shift=1.0,
        tie_embeddings=value["tie_word_embeddings"],
        embedding_norm=True,
        logit_multiplier=float(value["output_multiplier"]),
        logit_softcap=float(value["final_logit_softcapping"]),
        unread_ids=tuple(value[key] for key in UNREAD),
    )
    windows = {WINDOWED: gemma3.window(value), FULL: None}
    ropes = _ropes(value, count, rope)
    mixers = [{"window": windows[k], "rope": r} for k, r in zip(kinds, ropes, strict=True)]
    config = config.attending(*mixers)
    layers = [replace(x, eps_after=float(value["post_norm_eps"])) for x in config.layers]
    return replace(config, layers=tuple(layers))


def _ropes(value: dict[str, Any], count: int, rope: RopeConfig) -> list[RopeConfig | None]:
    """The RoPE of each layer: none where `layer_rope_theta` is 0, by default in every fourth.

    transformers rotates all other layers by one theta, so another one in the list is refused.
    """
    usual = [0 if (count - 1 - i) % 4 == 0 else rope.theta for i in range(count)]
    thetas = value.get("layer_rope_theta", usual)
    if len(thetas) != count or not {*thetas} <= {0, rope.theta}:
        raise ValueError(
            f"layer_rope_theta must be {count} of 0 and rope_theta {rope.theta:g}, "
            f"got {shown(thetas)}"
        )
    return [rope if theta else None for theta in thetas]
