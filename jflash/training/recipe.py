"""The settings of a drafter's training: its numbers, its loss, its share of the answers.

These records name no array and import no JAX.
"""

from dataclasses import dataclass, fields
from math import inf
from typing import NamedTuple

OPTIMIZERS = ("adamw", "muon")
LOSSES = ("ce", "kl", "tv")
WEIGHTS = ("decay", "dpace")
MOST_STEPS = 2**31 - 1  # the device counts them as int32


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run's numbers. Batches are rows; the schedule is `jflash.training.steps.learning_rates`."""

    steps: int
    batch_size: int  # of all devices together
    optimizer: str = "adamw"  # one of OPTIMIZERS
    learning_rate: float = 6e-4
    warmup: float = 0.04  # of all steps
    weight_decay: float = 0.01  # of matrices
    clip_norm: float = 1.0
    compute_dtype: str = "bfloat16"
    seed: int = 0
    steps_per_call: int = 50
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "steps_per_call", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps > MOST_STEPS:
            raise ValueError(f"steps must be at most {MOST_STEPS}, got {self.steps}")
        if not 0 < self.learning_rate < inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if not 0 <= self.weight_decay < inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {OPTIMIZERS}, got {self.optimizer!r}")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The recipe of the loss; the defaults are the paper's.

    loss: 'ce' is cross-entropy on the target's token; 'kl' is KL(p‖q) to the target's
    distribution p at the place; 'tv' is `ce_share` · ce + (1 - ce_share) · total variation of p, q.
    weights: 'decay' is exp(-(k-1)/γ); 'dpace' follows the drafter's confidence.
    """

    loss: str = "ce"
    weights: str = "decay"
    decay: float | None = None  # γ; None is the paper's for the block width
    dpace_alpha: float = 0.5
    ce_share: float = 0.1
    curriculum: float = 0.0  # share of the training after which all places count
    selector_weight: float = 1.0  # of the selector's loss beside this one; only for DFlash 2

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")
        if self.decay is not None and not self.decay > 0:
            raise ValueError(f"decay must be positive, got {self.decay}")
        if not 0 <= self.selector_weight < inf:
            raise ValueError(f"selector_weight must be at least 0, got {self.selector_weight}")
        for name in ("dpace_alpha", "ce_share", "curriculum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0 … 1, got {getattr(self, name)}")

    @property
    def soft(self) -> bool:
        """Whether the target's distribution is needed, not only its token."""
        return self.loss != "ce"

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in changed) or "the paper's"


PAPERS = Objective()


class Share(NamedTuple):
    """A share of the work: prompt i belongs to share i % `of`."""

    index: int = 0
    of: int = 1


WHOLE = Share()
