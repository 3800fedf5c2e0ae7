"""Muse-Glimmer: configs of small text models with a vision tower, and their norms."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MuseGlimmerConfig, PreTrainedModel

WINDOW = 12  # most texts exceed it
FULL, WINDOWED = "full_attention", "sliding_attention"


def muse_glimmer(*, vocab_size: int, num_hidden_layers: int, **given: Any) -> MuseGlimmerConfig:
    """A config whose last layer, and every second before it, has neither window nor positions.

    The tokens of images and videos lie past the vocabulary.
    """
    theta = given["rope_parameters"]["rope_theta"]
    whole = [(num_hidden_layers - 1 - i) % 2 == 0 for i in range(num_hidden_layers)]
    text = dict(
        vocab_size=vocab_size, num_hidden_layers=num_hidden_layers, sliding_window=WINDOW,
        layer_types=[FULL if full else WINDOWED for full in whole],
        layer_rope_theta=[0 if full else theta for full in whole],
        output_multiplier=0.6, final_logit_softcapping=15.0, qk_scale_factor=1.6,
        post_norm_eps=1e-3, **given,
    )  # fmt: skip
    vision = dict(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16,
        pos_emb_height=4, pos_emb_width=4,
    )  # fmt: skip
    return MuseGlimmerConfig(
        text_config=text, vision_config=vision, image_token_id=vocab_size,
        video_token_id=vocab_size + 1, out_hidden_size=16, projector_hidden_size=16,
        tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Norms of the layers, of 1 + w. The last one has its whole weight."""
    for name, parameter in model.named_parameters():
        if name == "model.language_model.norm.weight":
            parameter.uniform_(1.5, 3)
        elif "norm" in name:
            parameter.uniform_(-0.4, 0.4)
