"""Targets with attention sinks and windows: their configs, and what is constant at first."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GptOssConfig, PreTrainedModel

WINDOW = 8


def gpt_oss(
    *, rope_parameters: dict, intermediate_size: int, num_experts: int, moe_intermediate_size: int,
    **given: Any,
) -> GptOssConfig:  # fmt: skip
    """A config with windows in every second layer, YaRN, and experts in place of every MLP."""
    for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        given.pop(name)
    yarn = {
        "rope_type": "yarn", "rope_theta": rope_parameters["rope_theta"], "factor": 4.0,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    return GptOssConfig(
        rope_parameters=yarn,
        intermediate_size=moe_intermediate_size,
        num_local_experts=num_experts,
        sliding_window=WINDOW,
        **given,
    )


@torch.no_grad()
def randomise_gpt_oss(model: PreTrainedModel) -> None:
    """Sinks that matter, and gates of which some are beyond the clamp."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.normal_()
        elif name.endswith("gate_up_proj"):
            parameter.mul_(3)
