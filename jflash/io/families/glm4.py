"""GLM-4, dense (9B and 32B of 0414): sandwich norms, and half of each head turns, in pairs.

RoPE turns dims 2i and 2i + 1 of a head together; the loader permutes them to the halves that
jflash turns.
"""

from dataclasses import replace
from typing import Any

from jflash.io.families.trunk import COMMON, MLP, TENSORS, read_trunk
from jflash.records.config import TargetConfig

ARCHITECTURE, MODEL_TYPE = "Glm4ForCausalLM", "glm4"
DEFAULTS: dict[str, Any] = (
    COMMON
    | {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696}
    | {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2}
    | {"head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7}
    | {"attention_bias": True, "partial_rotary_factor": 0.5}
)
_GATE_UP = "mlp/gate_up/kernel"
NAMES = replace(
    TENSORS,
    every={
        "input_norm/scale": ("input_layernorm.weight",),
        "attention_norm/scale": ("post_self_attn_layernorm.weight",),
        "mlp_input_norm/scale": ("post_attention_layernorm.weight",),
        "mlp_norm/scale": ("post_mlp_layernorm.weight",),
    },
    mlps={kind: MLP | {_GATE_UP: ("mlp.gate_up_proj.weight",)} for kind in TENSORS.mlps},
    parts={_GATE_UP: ((0, 1),)},
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a dense GLM-4."""
    trunk, value = read_trunk(raw, DEFAULTS)
    trunk["rope"] = replace(trunk["rope"], in_pairs=True)
    return TargetConfig.alike(
        **trunk,
        tie_embeddings=value["tie_word_embeddings"],
        qkv_bias=value["attention_bias"],
        sandwich=True,
    )
