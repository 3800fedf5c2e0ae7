"""Targets with windows in some layers, sandwich norms, scaled embeddings: configs and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

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


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Norms, of 1 + w in Gemma 3. The head is the embedding: rows are small, or text repeats."""
    one = 0.0 if model.config.model_type == "gemma3_text" else 1.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            parameter.mul_(0.2)
        elif name == "model.norm.weight":
            parameter.uniform_(2.5, 4)
        elif "norm" in name:
            low = 0.2 if "self_attn" in name else -0.4
            parameter.uniform_(one + low, one + low + 0.8)
