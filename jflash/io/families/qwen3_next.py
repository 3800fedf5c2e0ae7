"""Qwen3-Next and Qwen3-Coder-Next: the hybrid whose delta nets are stored by key head."""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from jflash.io.families import qwen3_5, qwen3_5_moe
from jflash.io.hf_values import checked
from jflash.records.config import TargetConfig
from jflash.records.specs import DeltaSpec, LayerConfig

ARCHITECTURE, MODEL_TYPE = "Qwen3NextForCausalLM", "qwen3_next"
DEFAULTS: dict[str, Any] = (
    qwen3_5.HYBRID
    | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632}
    | {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2}
    | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []}
)
_INPUTS = "attention/inputs/kernel"


def by_kind(layer: LayerConfig) -> Int[np.ndarray, " C"]:
    """Order that takes rows by key head (q, k, v, z; then b, a) to rows by kind, of all heads."""
    mixer = layer.mixer
    assert isinstance(mixer, DeltaSpec)
    Hk, Hv, dk, dv = mixer.num_key_heads, mixer.num_value_heads, mixer.key_dim, mixer.value_dim
    r = Hv // Hk
    sizes = (dk, dk, r * dv, r * dv)
    head = np.arange(Hk)[:, None] * sum(sizes)
    firsts = np.cumsum([0, *sizes[:-1]])
    kinds = [head + f + np.arange(n) for f, n in zip(firsts, sizes, strict=True)]
    pair, ba = np.arange(Hk)[:, None] * 2 * r, Hk * sum(sizes)
    kinds += [ba + pair + np.arange(r), ba + pair + r + np.arange(r)]
    return np.concatenate([kind.reshape(-1) for kind in kinds])


_MIXERS, _PARTS = qwen3_5.NAMES.mixers, qwen3_5.NAMES.parts
_TENSORS = {_INPUTS: tuple(f"linear_attn.in_proj_{x}.weight" for x in ("qkvz", "ba"))}
NAMES = replace(
    qwen3_5_moe.NAMES,
    mixers=_MIXERS | {DeltaSpec: qwen3_5.DELTA | _TENSORS},
    parts=_PARTS | {_INPUTS: ((0, 1), (2, 3))},
    orders={_INPUTS: by_kind},
)


def target(raw: dict[str, Any]) -> TargetConfig:
    """The config of a Qwen3-Next."""
    value = DEFAULTS | checked(raw, DEFAULTS)
    config = qwen3_5.read(raw, DEFAULTS)
    step, dense = value["decoder_sparse_step"], value["mlp_only_layers"]
    layers = range(config.num_layers)
    sparse = [i for i in layers if value["num_experts"] and i not in dense and (i + 1) % step == 0]
    if not sparse:
        return config
    return config.with_experts(qwen3_5_moe.experts(value, value["norm_topk_prob"]), sparse)
