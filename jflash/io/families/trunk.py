"""What the families of decoders share: the layer's sizes and its tensors' names, as Llama has them.

A missing key takes the default of transformers' class; a feature that is not implemented is a
ValueError that names it.
"""

from typing import Any

from jflash.io.hf_rope import rope_config
from jflash.io.hf_values import checked, shown
from jflash.io.names import Names
from jflash.io.quantised.scheme import scheme_of
from jflash.records.config import TargetConfig
from jflash.records.specs import AttentionSpec, DenseSpec

# transformers 5's defaults. None for head_dim means hidden_size / heads, for KV heads all heads.
COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
SILU = ("silu", "swish")  # transformers' two names of one activation
_KEYS = ("quantization_config", "rope_parameters", "rope_scaling")  # these have no default
_WINDOWS = ("layer_types", "use_sliding_window", "max_window_layers")
# Leaf -> its tensors; a family that has others replaces a table or adds to it.
NORMS = {
    "input_norm/scale": ("input_layernorm.weight",),
    "post_norm/scale": ("post_attention_layernorm.weight",),
}
ATTENTION = {
    "attention/q_norm/scale": ("self_attn.q_norm.weight",),
    "attention/k_norm/scale": ("self_attn.k_norm.weight",),
    "attention/qkv/kernel": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "attention/qkv/bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "attention/out/kernel": ("self_attn.o_proj.weight",),
    "attention/out/bias": ("self_attn.o_proj.bias",),
}
MLP = {
    "mlp/gate_up/kernel": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp/gate_up/bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp/down/kernel": ("mlp.down_proj.weight",),
    "mlp/down/bias": ("mlp.down_proj.bias",),
}
TENSORS = Names(
    ends={
        "embedding": ("model.embed_tokens.weight",),
        "norm/scale": ("model.norm.weight",),
        "head": ("lm_head.weight",),
    },
    every=NORMS,
    mixers={AttentionSpec: ATTENTION},
    mlps={DenseSpec: MLP},
)


def read_target(raw: dict[str, Any], defaults: dict[str, Any], **fields: Any) -> TargetConfig:
    """A dense target: the common fields, and `fields` of the family."""
    trunk, value = read_trunk(raw, defaults)
    return TargetConfig.alike(**trunk, tie_embeddings=value["tie_word_embeddings"], **fields)


def refuse_windows(raw: dict[str, Any], count: int) -> None:
    """ValueError if one of `count` layers has a window, by the rules of Qwen2's and Qwen3's class.

    Layers from `max_window_layers` on have one, unless `layer_types` says of each.
    """
    value = checked(raw, _WINDOWS)
    on = value.get("use_sliding_window", False) and raw.get("sliding_window", 4096) is not None
    windowed = on and value.get("max_window_layers", 28) < count
    if (types := value.get("layer_types")) is not None:
        windowed = any(kind != "full_attention" for kind in types)
    if windowed:
        raise ValueError("sliding_window: targets with sliding-window layers are not supported")


def refuse(value: dict[str, Any], **supported: tuple[Any, ...]) -> None:
    """ValueError for a key whose value is not one of those that are supported."""
    for key, known in supported.items():
        if value.get(key) not in known:
            only = " or ".join(map(repr, known))
            raise ValueError(f"{key} {shown(value[key])} is not supported, only {only}")


def renamed(raw: dict[str, Any], other: str, name: str) -> dict[str, Any]:
    """The config with the value of a key's other name, which comes first as in transformers."""
    value = checked(raw, (other,)).get(other)
    return raw if value is None else raw | {name: value}


def all_heads(raw: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The config with all heads where null stands for them: transformers' Qwen2, Qwen3 and Llama.

    An absent key stands for `defaults`'; transformers' other classes refuse null.
    """
    name = "num_key_value_heads"
    if raw.get(name, 0) is not None:
        return raw
    return raw | {name: (defaults | checked(raw, defaults))["num_attention_heads"]}


def read_trunk(
    raw: dict[str, Any], defaults: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """DecoderConfig's common fields, and the family's keys with defaults filled in."""
    value = defaults | checked(raw, (*defaults, *_KEYS))
    refuse(value, hidden_act=SILU)
    sizes, share = read_sizes(value), defaults.get("partial_rotary_factor")
    rope = rope_config(raw, value["max_position_embeddings"], sizes["head_dim"], share)
    return sizes | {"rope": rope}, value


def read_sizes(value: dict[str, Any]) -> dict[str, Any]:
    """DecoderConfig's common fields but for RoPE, from keys with defaults filled in."""
    if "quantization_config" in checked(value, _KEYS):
        scheme_of(value["quantization_config"])  # refuses what is not read
    heads = value["num_attention_heads"]
    head_dim = value["head_dim"] or value["hidden_size"] // heads
    if head_dim < 1:
        raise ValueError(f"num_attention_heads {heads} are more than hidden_size has columns")
    return dict(
        vocab_size=value["vocab_size"],
        hidden_size=value["hidden_size"],
        intermediate_size=value["intermediate_size"],
        num_layers=value["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=value["num_key_value_heads"] or heads,
        head_dim=head_dim,
        rms_norm_eps=float(value["rms_norm_eps"]),
        max_position_embeddings=value["max_position_embeddings"],
    )
