"""Targets with gated delta nets: their configs, their weights, and a rollback that is one.

dflash 0.1.0 leaves the greedy text of such targets: transformers' `crop` cuts the state of the
convolution and never the recurrent one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dflash.model
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

KINDS = ("linear_attention", "full_attention")
# Value heads twice the key heads, and of another width: no layout agrees by accident.
DELTA = dict(
    linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
for modeling in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
    # Chunks of 64, most of them padding, are all that a small target's time goes to.
    plain = modeling.torch_chunk_gated_delta_rule
    modeling.torch_chunk_gated_delta_rule = partial(plain, chunk_size=8)


def hybrid(config_class: Callable[..., Any], **own: Any) -> Callable[..., Any]:
    """Makes configs of layers by turns, a delta net the first, of which half a head turns."""

    def make(*, rope_parameters: dict, num_hidden_layers: int, **given: Any) -> Any:
        return config_class(
            rope_parameters=rope_parameters | {"partial_rotary_factor": 0.5},
            num_hidden_layers=num_hidden_layers,
            layer_types=[KINDS[i % 2] for i in range(num_hidden_layers)],
            **(DELTA | own | given),
        )

    return make


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """What is constant at first, and norms of 1 + w. A state that forgets within a token would hide
    every fault of a rollback."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.2, 2).log_()
        elif name.endswith("dt_bias"):
            parameter.normal_(-0.5, 0.5)
        elif "norm" in name and "linear_attn" not in name:
            parameter.uniform_(-0.4, 0.4)


@contextmanager
def exact_rollback(target: PreTrainedModel) -> Iterator[None]:
    """The target's cache before each call is kept, and what a crop leaves is run through again."""
    if not any("A_log" in name for name, _ in target.named_parameters()):
        yield
        return
    forward, crop, last = target.forward, dflash.model._crop_to, {}

    def watched(input_ids: torch.Tensor, **rest: Any) -> Any:
        cache = rest.get("past_key_values")
        if cache is not None:
            before = copy.deepcopy(cache.layers)
            last.update(cache=cache, before=before, ids=input_ids, at=rest["position_ids"])
        return forward(input_ids, **rest)

    def cut(cache: Any, length: int) -> None:
        dropped = cache.get_seq_length() - length
        if cache is not last.get("cache"):
            crop(cache, length)
        elif dropped:
            kept = last["ids"].shape[1] - dropped
            cache.layers = last["before"]
            forward(
                last["ids"][:, :kept], position_ids=last["at"][:, :kept], past_key_values=cache,
                use_cache=True,
            )  # fmt: skip

    target.forward, dflash.model._crop_to = watched, cut
    try:
        yield
    finally:
        del target.forward
        dflash.model._crop_to = crop
