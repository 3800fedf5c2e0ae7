"""The numbers of the embedded pair: its sizes, its data, its trainings; and a tiny run's."""

from dataclasses import dataclass, replace
from typing import Any

from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import RopeConfig
from jflash.training.drafter import drafter_config_for
from jflash.training.recipe import TrainConfig
from tiny_pair.tokenizer import MASK, SPECIAL


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All numbers of a run."""

    target: TargetConfig
    drafter: DrafterConfig
    target_training: TrainConfig
    drafter_training: TrainConfig
    problems: int  # made up, for the target
    gsm8k_repeats: int  # times that GSM8K's training set is among them, if given
    row_length: int
    prompt_weight: float  # of a prompt's tokens in the target's loss
    answers: int  # made-up prompts the target answers, for the drafter
    gsm8k_variants: int  # of each GSM8K training question, with other numbers, likewise
    answer_batch: int
    max_new_tokens: int
    anchors: int


TARGET: dict[str, Any] = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=640,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0, scaling=None),
    max_position_embeddings=2048,
    qk_norm=True,
    tie_embeddings=True,
)


def full_recipe() -> Recipe:
    """What the embedded pair was made with: a few minutes a stage on one H200."""
    target = TargetConfig.alike(**TARGET)
    return Recipe(
        target=target,
        drafter=drafter_config_for(
            target,
            num_layers=2,
            block_size=16,
            mask_token_id=SPECIAL.index(MASK),
            target_layer_ids=(0, 2, 4, 6, 7),
        ),
        target_training=TrainConfig(
            steps=15_000, batch_size=192, learning_rate=2e-3, weight_decay=0.05
        ),
        drafter_training=TrainConfig(steps=10_000, batch_size=96, learning_rate=1e-3),
        problems=800_000,
        gsm8k_repeats=2,
        row_length=320,
        prompt_weight=0.1,
        answers=20_000,
        gsm8k_variants=4,
        answer_batch=1024,
        max_new_tokens=256,
        anchors=48,
    )


def smoke_recipe() -> Recipe:
    """The same stages at sizes for two CPU cores and a quarter of a minute; it knows nothing."""
    full = full_recipe()
    small: dict[str, Any] = dict(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, head_dim=16
    )
    target = TargetConfig.alike(**(TARGET | small))
    training = TrainConfig(
        steps=12, batch_size=2, learning_rate=3e-3, compute_dtype="float32", steps_per_call=4,
        checkpoint_every=8,
    )  # fmt: skip
    return replace(
        full,
        target=target,
        drafter=drafter_config_for(
            target, num_layers=1, block_size=8, mask_token_id=SPECIAL.index(MASK)
        ),
        target_training=training,
        drafter_training=training,
        problems=400,
        gsm8k_repeats=1,
        row_length=320,
        answers=24,
        gsm8k_variants=0,
        answer_batch=8,
        max_new_tokens=32,
        anchors=16,
    )
