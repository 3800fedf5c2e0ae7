"""A target from scratch: next-token cross-entropy over whole conversations."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jflash.models.decoder import Target
from jflash.models.params import random_params
from jflash.records.config import TargetConfig
from jflash.speculative import apply
from jflash.training.attention import causal_attend
from jflash.training.data import Conversation, Rows, check_tokens, describe, pack
from jflash.training.losses import (
    cross_entropy,
    head_logits,
    lookup,
    scale_residual_outputs,
    weighted_mean,
)
from jflash.training.recipe import TrainConfig
from jflash.training.trainer import Trained, train


class TrainedTarget(Target):
    """The same parameters and outputs, with an embedding that trains well in bfloat16."""

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return lookup(self.embedding, tokens)


def init_target(config: TargetConfig, seed: int) -> Any:
    """Float32 params of an untrained target: normal(0, 0.02), residual outputs scaled down."""
    return scale_residual_outputs(random_params(config, seed), config.num_layers)


def target_loss(
    target: TrainedTarget,
    prompt_weight: float,
    params: Any,
    frozen: None,
    rows: Rows,
    key: Key[Array, ""],
    progress: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Σ w · CE / Σ w of every next token: w is 1 for answers, `prompt_weight` for prompts.

    The metric `accuracy` counts answer tokens only. Draws nothing: `key` is there for the trainer,
    and so are `frozen` and `progress`. Bind the first two arguments.
    """
    del frozen, key, progress
    hidden, _, _ = apply(
        target, params, rows.tokens, rows.positions,
        (None,) * target.config.num_layers, causal_attend(rows),
    )  # fmt: skip
    logits = head_logits(target, params, hidden)
    # The last token of a conversation predicts nothing; neither does padding.
    following = jnp.pad(rows.segments[:, 1:], ((0, 0), (0, 1)))
    labels = jnp.pad(rows.tokens[:, 1:], ((0, 0), (0, 1)))
    answer = jnp.pad(rows.supervised[:, 1:], ((0, 0), (0, 1)))
    real = (following == rows.segments) & (following > 0)
    weights = jnp.where(real, jnp.where(answer, 1.0, prompt_weight), 0.0)
    loss = weighted_mean(cross_entropy(logits, labels), weights)
    correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return loss, {"accuracy": weighted_mean(correct, (real & answer).astype(jnp.float32))}


def train_target(
    config: TargetConfig,
    conversations: Iterable[Conversation],
    *,
    row_length: int,
    prompt_weight: float,
    training: TrainConfig,
    directory: Path,
    should_stop: Callable[[int], bool],
) -> Trained:
    """Packs the conversations and trains a new target on them; see trainer.train."""
    rows, dropped = pack(conversations, row_length)
    check_tokens(rows, config.vocab_size)
    describe(rows, dropped)
    loss = partial(target_loss, TrainedTarget(config), prompt_weight)
    return train(
        loss, init_target(config, training.seed), None, rows, training, directory,
        identity=asdict(config) | {"prompt_weight": prompt_weight}, should_stop=should_stop,
        title="target",
    )  # fmt: skip
