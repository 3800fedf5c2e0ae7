"""Targets with windows in some layers, sandwich norms, scaled embeddings: configs and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Gemma4TextConfig, PreTrainedModel

WINDOWED, FULL = "sliding_attention", "full_attention"


def windowed(config_class: Callable[..., Any], full_rope: dict, **own: Any) -> Callable[..., Any]:
    """Makes configs of layers by turns, the last one without a window, with a RoPE for each kind.

    Windows are shorter than most prompts, and their layers have another theta.
    """

    def make(*, rope_parameters: dict, num_hidden_layers: int, **given: Any) -> Any:
        last = num_hidden_layers - 1
        kinds = [(FULL, WINDOWED)[(last - i) % 2] for i in range(num_hidden_layers)]
        ropes = {FULL: rope_parameters | full_rope, WINDOWED: dict(rope_parameters)}
        ropes[WINDOWED]["rope_theta"] = rope_parameters["rope_theta"] / 50
        return config_class(
            rope_parameters=ropes,
            num_hidden_layers=num_hidden_layers,
            layer_types=kinds,
            sliding_window=12,
            final_logit_softcapping=20.0,
            **(own | given),
        )

    return make


def gemma4(*, num_attention_heads: int, head_dim: int, **given: Any) -> Any:
    """Gemma 4: wider layers without a window, with one key head, whose values are the keys."""
    experts = {}
    if given.pop("num_experts", None):
        experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
        experts["moe_intermediate_size"] = given.pop("moe_intermediate_size")
    for key in ("num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        given.pop(key, None)
    full_rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    make = windowed(Gemma4TextConfig, full_rope)
    return make(
        num_attention_heads=num_attention_heads, head_dim=head_dim, global_head_dim=2 * head_dim,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        **experts, **given,
    )  # fmt: skip


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Norms, of 1 + w in Gemma 3. The head is the embedding: rows are small, or text repeats."""
    one = 0.0 if model.config.model_type == "gemma3_text" else 1.0
    for name, number in model.named_buffers():
        if name.endswith("layer_scalar"):
            number.copy_(number.uniform_(0.6, 0.9).bfloat16())
    for name, parameter in model.named_parameters():
        if name.endswith("scale"):  # of a router's input and of its weights
            parameter.uniform_(0.7, 1.3)
        elif "embed_tokens" in name:
            parameter.mul_(0.12)
        elif name == "model.norm.weight":
            parameter.uniform_(4, 6.5)
        elif one and "self_attn" in name and "norm" in name:  # Gemma 4 does not scale scores down
            parameter.uniform_(0.4, 0.8)
        elif "norm" in name:
            low = 0.2 if "self_attn" in name else -0.4
            parameter.uniform_(one + low, one + low + 0.8)
