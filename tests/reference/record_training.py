"""The loss of a training step and its gradients, by the reference's own modules.

python tests/reference/record_training.py
Writes tests/golden/training.json. Needs torch, transformers and dflash, not JAX. Every block runs
alone, as in decoding: no mask of the training stands between the drafter and the formula of its
loss. Anchors are all answer tokens that another one follows.
"""

import json
from math import exp
from pathlib import Path

import dflash.model
import torch
from dflash.model import extract_context_feature
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

TESTS = Path(__file__).parents[1]
# Folder, the length of each conversation's prompt and answer, γ of the decay, and the loss.
STEPS = {
    "cross-entropy": ("window_cases/pair00", [(3, 12), (9, 7), (1, 2), (5, 1)], 4.0, "ce"),
    "total variation": ("window_cases/pair01", [(6, 9), (2, 11)], 2.5, "tv"),
    "D-PACE": ("window_cases/pair02", [(4, 10), (7, 4)], None, "ce"),
    "DFlash 2": ("dflash2_cases/pair02", [(5, 20), (11, 6)], 7.0, "selector"),
}
CE_SHARE, ALPHA = 0.1, 0.5  # of total variation's mixture; of D-PACE


def pair_of(folder: Path) -> tuple[nn.Module, nn.Module]:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    name = json.loads((folder / "drafter" / "config.json").read_text())["architectures"][0]
    drafter = getattr(dflash.model, name).from_pretrained(folder / "drafter", dtype=torch.float32)
    return target.eval().requires_grad_(False), drafter.eval()


def conversation(prompt: int, answer: int, vocab: int, draw: torch.Generator) -> dict:
    def ids(n: int) -> list[int]:
        return torch.randint(vocab, (n,), generator=draw).tolist()

    return {"prompt_ids": ids(prompt), "answer_ids": ids(answer)}


def place_losses(drafter, target, hidden, logits, wanted, previous, labels, loss: str):
    """The loss of each place of a block, and the label's probability."""
    cross = F.cross_entropy(logits, labels, reduction="none")
    if loss == "tv":
        apart = (wanted.softmax(-1) - logits.softmax(-1)).abs().sum(-1) / 2
        return CE_SHARE * cross + (1 - CE_SHARE) * apart, cross
    if loss == "selector":
        selector = drafter.candidate_selector
        left = selector.predecessor_codebook(previous) * selector.hidden_projection(hidden)
        scores = logits + left @ selector.successor_codebook.weight.T
        counts = torch.zeros_like(scores, dtype=torch.bool)
        counts.scatter_(-1, logits.topk(selector.top_k, dim=-1).indices, True)
        counts.scatter_(-1, labels[:, None], True)
        chosen = F.cross_entropy(scores.masked_fill(~counts, -torch.inf), labels, reduction="none")
        return cross + chosen, cross
    return cross, cross


def step_loss(drafter, target, talks: list[dict], gamma: float | None, loss: str) -> torch.Tensor:
    """Σ w·loss / Σ w over all blocks, or with D-PACE's weights over their number and places."""
    width, total, weight, blocks = drafter.block_size, torch.zeros(()), 0.0, 0
    scale = float(dflash.model._draft_value(drafter.config, "input_embedding_scale", 1.0))
    for talk in talks:
        ids = torch.tensor([talk["prompt_ids"] + talk["answer_ids"]])
        with torch.no_grad():
            out = target(ids, output_hidden_states=True)
        features = extract_context_feature(out.hidden_states, drafter.target_layer_ids)
        for anchor in range(len(talk["prompt_ids"]), ids.shape[1] - 1):
            block = torch.full((1, width), drafter.mask_token_id)
            block[0, 0] = ids[0, anchor]
            hidden = drafter(
                target_hidden=features[:, :anchor],
                noise_embedding=target.get_input_embeddings().weight[block] * scale,
                position_ids=torch.arange(anchor + width)[None],
            )[0, 1:]
            labels = ids[0, anchor + 1 : anchor + width]
            hidden = hidden[: len(labels)]
            logits = drafter.compute_logits(hidden, target.lm_head)
            before = slice(anchor, anchor + len(labels))
            losses, cross = place_losses(
                drafter, target, hidden, logits, out.logits[0, before], ids[0, before], labels, loss
            )
            if gamma is None:
                reach = ((1 - ALPHA) * torch.exp(-cross.detach()) + ALPHA).cumprod(0)
                weights = reach.flip(0).cumsum(0).flip(0)
            else:
                weights = torch.tensor([exp(-k / gamma) for k in range(len(labels))])
                weight += weights.sum().item()
            total, blocks = total + (weights * losses).sum(), blocks + 1
    return total / (weight or blocks * (width - 1))


def seen(gradient: torch.Tensor) -> list[float]:
    """Two numbers of a gradient: its norm, and its sum with a wave over its places."""
    flat = gradient.double().flatten()
    wave = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    return [float(f"{x:.8g}") for x in (flat.norm().item(), (flat * wave).sum().item())]


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, (where, sizes, gamma, loss) in STEPS.items():
        target, drafter = pair_of(TESTS / "reference" / where)
        draw = torch.Generator().manual_seed(0)
        vocab = target.config.vocab_size
        talks = [conversation(*size, vocab, draw) for size in sizes]
        value = step_loss(drafter, target, talks, gamma, loss)
        value.backward()
        gradients = {n.removesuffix(".weight") if "codebook" in n else n: seen(p.grad)
                     for n, p in drafter.named_parameters()}  # fmt: skip
        found[name] = {
            "pair": where, "decay": gamma, "conversations": talks,
            "loss": float(f"{value.item():.8g}"), "gradients": gradients,
        }  # fmt: skip
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
    (TESTS / "golden" / "training.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
