"""The assistant of Muse-Glimmer: Qwen3's trunk of a DFlash drafter, version 1, under other names.

What it is follows from transformers' classes; its published file was not opened. All rows of a
block see each other, and a window counts the keys at its distance: one more than dflash's. Its
config.json says neither the vocabulary nor how many layers the target has.
"""

from dataclasses import replace
from typing import Any

from jflash.io.families import dflash, muse_glimmer
from jflash.io.hf_values import SIZE, checked, shown

ARCHITECTURE, MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
DEFAULTS: dict[str, Any] = (
    {"hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 5}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "hidden_act": "silu"}
    | {"sliding_window": 2048, "block_size": 16, "mask_token_id": 201818}
    | {"target_layer_ids": [1, 13, 25, 37, 49]}
)
THETA = 5e5
NAMES = replace(
    dflash.NAMES,
    ends=dflash.NAMES.ends
    | {
        "fc/kernel": ("encoder.fc.weight",),
        "hidden_norm/scale": ("encoder.output_norm_enc.weight",),
    },
)


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The same config under dflash's keys; ValueError for a window that is none."""
    value = DEFAULTS | checked(raw, (*DEFAULTS, "layer_types"))
    types = value.get("layer_types", ["sliding_attention"] * value["num_hidden_layers"])
    window = value["sliding_window"]
    if not SIZE.holds(window):
        raise ValueError(f"sliding_window must be {SIZE.words}, got {shown(window)}")
    return (
        {"vocab_size": muse_glimmer.DEFAULTS["vocab_size"], "rope_theta": THETA}
        | value
        | {"architectures": [dflash.DRAFTER], "input_embedding_scale": 1.0, "is_causal": False}
        | {"layer_types": types, "use_sliding_window": True, "sliding_window": window + 1}
    )
