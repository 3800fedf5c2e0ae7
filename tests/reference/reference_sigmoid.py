"""GLM-4, and targets whose experts are chosen by sigmoids: configs, and their corrections."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Glm4Config, Glm4MoeConfig, MiniMaxM2Config, PreTrainedModel


def minimax_m2(
    *, rope_parameters: dict, intermediate_size: int, num_experts: int, moe_intermediate_size: int,
    **given: Any,
) -> MiniMaxM2Config:  # fmt: skip
    """A config of which half a head turns, with experts in place of every MLP."""
    for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        given.pop(name)
    return MiniMaxM2Config(
        rope_parameters=rope_parameters | {"partial_rotary_factor": 0.5},
        intermediate_size=moe_intermediate_size,
        num_local_experts=num_experts,
        **given,
    )


def glm4_moe(
    *, rope_parameters: dict, num_experts: int, mlp_only_layers: list, **given: Any
) -> Glm4MoeConfig:
    """A config of which half a head turns, with groups of experts and two shared ones."""
    given.pop("decoder_sparse_step")
    return Glm4MoeConfig(
        rope_parameters=rope_parameters | {"partial_rotary_factor": 0.5},
        n_routed_experts=num_experts,
        first_k_dense_replace=len(mlp_only_layers),
        n_group=num_experts // 2,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
        attention_bias=True,
        **given,
    )


def glm4(*, rope_parameters: dict, **given: Any) -> Glm4Config:
    """A config of a dense GLM-4, of which half a head turns."""
    return Glm4Config(rope_parameters=rope_parameters | {"partial_rotary_factor": 0.5}, **given)


@torch.no_grad()
def randomise_corrections(model: PreTrainedModel) -> None:
    """They are zero at first, and buffers."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_((0.3 * torch.randn_like(buffer)).bfloat16())
