"""Trains the drafters of `make_cases.py`, the way DFlash does: random anchors, one mask per block.

They learn their targets' text by heart, partly, so that every acceptance length from 1 to the
block width turns up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from dflash.model import DFlashDraftModel, extract_context_feature
from reference_pairs import Unusable, embedding_scale
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel


@torch.inference_mode()
def greedy_texts(target: PreTrainedModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Prompts with the target's own continuation, made in one left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = target.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    texts = [row[longest - len(p) :] for row, p in zip(out.tolist(), prompts, strict=True)]
    seen = [len(set(text[len(p) :])) for text, p in zip(texts, prompts, strict=True)]
    if sum(seen) < 10 * len(seen) or sum(s < 3 for s in seen) > len(seen) // 3:
        raise Unusable("the target's text is too monotonous")
    return texts


class Lessons:
    """The texts, right-padded, with the target's features; deals out batches of blocks."""

    def __init__(
        self, drafter: DFlashDraftModel, target: PreTrainedModel, texts: list, prompts: list
    ) -> None:
        self.drafter, self.target, self.width = drafter, target, drafter.block_size
        longest = max(map(len, texts))
        # Padding on the right needs no mask: both models only look at what precedes an anchor.
        self.ids = torch.tensor([t + [0] * (longest - len(t)) for t in texts])
        self.first = torch.tensor([len(p) for p in prompts])
        self.last = torch.tensor([len(t) - self.width for t in texts])
        with torch.no_grad():
            states = target(self.ids, output_hidden_states=True).hidden_states
            self.features = extract_context_feature(states, drafter.target_layer_ids)
        self.embedding = target.get_input_embeddings().weight * embedding_scale(drafter)

    def loss(self, rows: torch.Tensor, blocks: int) -> tuple[torch.Tensor, float]:
        """DFlash's loss on random anchors, and the mean acceptance length these blocks had."""
        width, size = self.width, len(rows)
        first, last = self.first[rows, None], self.last[rows, None]
        anchor = first + (torch.rand(size, blocks) * (last - first + 1)).long()
        length = int(anchor.max())
        ids = self.ids[rows]
        at = (anchor[:, :, None] + torch.arange(width)).view(size, -1)
        noise = torch.full((size, blocks, width), self.drafter.mask_token_id)
        noise[:, :, 0] = ids.gather(1, anchor)
        block = torch.arange(blocks).repeat_interleave(width)
        context = torch.arange(length) < anchor.repeat_interleave(width, 1)[:, :, None]
        own = (block[:, None] == block).expand(size, -1, -1)
        places = torch.cat([torch.arange(length).expand(size, -1), at], 1)
        with own_masks(self.drafter, torch.cat([context, own], 2), at, places):
            hidden = self.drafter(
                position_ids=places,
                noise_embedding=self.embedding[noise.view(size, -1)],
                target_hidden=self.features[rows, :length],
            )
        logits = self.target.lm_head(hidden).view(size, blocks, width, -1)[:, :, 1:]
        labels = ids.gather(1, at).view(size, blocks, width)[:, :, 1:]
        nll = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        weight = torch.exp(-torch.arange(width - 1) / 7.0)
        hits = (logits.argmax(-1) == labels).cumprod(-1).sum(-1)
        loss = (nll.view_as(labels) * weight).sum() / (weight.sum() * size * blocks)
        return loss, 1 + hits.float().mean().item()


@contextmanager
def own_masks(
    drafter: DFlashDraftModel, seen: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> Iterator[None]:
    """Gives every layer `seen`, cut as its window and causality say for rows at these positions."""
    ahead = key[:, None, :] - query[:, :, None]

    def mask_of(attention: nn.Module) -> torch.Tensor:
        mask, window = seen, attention.sliding_window
        if attention.is_causal:
            mask = mask & (ahead <= 0)
        if window is not None:
            mask = mask & (ahead.abs() < window)
        return mask[:, None]

    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, given: (args, given | {"attention_mask": mask_of(module)}),
            with_kwargs=True,
        )
        for layer in drafter.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def train(lessons: Lessons, goal: float, most: int = 600, batch: int = 12) -> None:
    """Adam until the blocks accept `goal` tokens on average; some more steps never hurt a case."""
    drafter = lessons.drafter.train()
    optimiser = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    blocks, running = max(6, 48 // lessons.width), 1.0
    # Rows with a long prompt cost several times a short one's: they get small batches of their own.
    short = (lessons.first < 100).nonzero()[:, 0]
    long = (lessons.first >= 100).nonzero()[:, 0]
    for step in range(most):
        rows = long if step % 5 == 4 else short[torch.randperm(len(short))[:batch]]
        for group in optimiser.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 20) * (1 - 0.8 * step / most)
        loss, accepted = lessons.loss(rows, blocks)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        running = 0.95 * running + 0.05 * accepted
        if running > goal:
            break
    if running < 1 + 0.5 * (goal - 1):
        raise Unusable(f"the drafter learnt too little ({running:.2f} of {goal:.2f})")
    drafter.eval().requires_grad_(False)
