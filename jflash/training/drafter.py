"""A drafter for any supported target: its configuration, its sizes and its training."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import abstract_params
from jflash.records.config import (
    DecoderConfig,
    DrafterConfig,
    TargetConfig,
    default_target_layer_ids,
)
from jflash.records.specs import ProportionalScaling, RopeConfig
from jflash.temporaries import FLOAT32
from jflash.training.attention import training_backend
from jflash.training.data import Conversation, Rows, check_answers, check_tokens, describe, pack
from jflash.training.drafter_loss import Blocks, chunks_for, drafter_loss, init_drafter
from jflash.training.recipe import PAPERS, Objective, TrainConfig
from jflash.training.steps import LossFn
from jflash.training.trainer import Evaluation, Trained, crc32_of, train

SAMPLED = 4096  # numbers of each leaf of the target that make a training's identity


def drafter_config_for(
    target: TargetConfig, *, num_layers: int, block_size: int, mask_token_id: int,
    target_layer_ids: Sequence[int] | None = None, intermediate_size: int | None = None,
) -> DrafterConfig:  # fmt: skip
    """A drafter with its target's sizes; by default it taps the layers of the published rule."""
    if intermediate_size is not None and intermediate_size < 1:
        raise ValueError(f"intermediate_size must be at least 1, got {intermediate_size}")
    if num_layers < 1:
        raise ValueError(f"a drafter needs at least 1 layer, got {num_layers}")
    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(target.num_layers, num_layers)
        _check_rule(target.num_layers, num_layers, target_layer_ids)
    if len(set(target_layer_ids)) < len(target_layer_ids):  # files may, but nothing is learnt by it
        raise ValueError(f"target_layer_ids {list(target_layer_ids)} repeat a layer")
    mixer = target.mixers[0]
    return DrafterConfig.alike(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=num_layers,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=_rope_for(target),
        max_position_embeddings=target.max_position_embeddings,
        # A drafter is of Qwen3's shape whatever its target: norms on q and k, no biases.
        qk_norm=True,
        causal=False,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=target.num_layers,
        input_embedding_scale=target.embedding_scale,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )


def _check_rule(target_layers: int, num_layers: int, ids: Sequence[int]) -> None:
    """ValueError if the published rule, which is for deep targets, names layers twice or none."""
    if len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < target_layers:
        raise ValueError(
            f"num_layers {num_layers}: for a target of {target_layers} layers the published rule "
            f"gives target_layer_ids {list(ids)}: give fewer layers, or target_layer_ids"
        )


def _rope_for(target: TargetConfig) -> RopeConfig | None:
    """That of the target's first layer without a window, on whole heads: a drafter sees it all.

    Some targets have no positions there, and then it is that of the first layer with some.
    """
    ropes = [m.rope for m in target.mixers if m.rope and m.window is None]
    ropes += [m.rope for m in target.mixers if m.rope]
    if not ropes:
        return None
    rope = ropes[0]
    proportional = isinstance(rope.scaling, ProportionalScaling)
    scaling = None if proportional else rope.scaling
    return replace(rope, rotary_dim=None, in_pairs=False, scaling=scaling)


def default_mask_token_id(tokenizer: Any, vocab_size: int) -> int:
    """The tokenizer's mask token, else the first unused id, else an idle special token.

    An idle token occurs in no text and no template: one named reserved or unused, or the last.
    ValueError if there is none of these, or no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("the target holds no tokenizer: give --mask-token-id")
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return int(tokenizer.mask_token_id)
    used = set(tokenizer.get_vocab().values())  # some tokenizers leave ids out between
    unused = next((i for i in range(vocab_size) if i not in used), None)
    if unused is not None:
        return unused
    idle = _idle_special_tokens(tokenizer)
    if not idle:
        raise ValueError(
            f"the tokenizer uses all {vocab_size} ids and has no mask token: give --mask-token-id"
        )
    named = {text: i for text, i in idle.items() if "reserved" in text or "unused" in text}
    return min(named.values()) if named else max(idle.values())


def _idle_special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens that neither the chat template nor the start or end of a text uses."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    template = str(getattr(tokenizer, "chat_template", None) or "")
    roles = ("bos", "eos", "pad", "unk", "sep", "cls")
    taken = {getattr(tokenizer, f"{role}_token_id", None) for role in roles}
    special = {str(token): i for i, token in added.items() if token.special and i not in taken}
    return {text: i for text, i in special.items() if text not in template}


def check_trainable(config: DrafterConfig) -> None:
    """ValueError for a drafter that the trainer cannot go on with."""
    if config.own_embedding or config.draft_vocab_size:
        raise ValueError("a drafter that brings an embedding or a head is not trained further")


def check_sizes(target: TargetConfig, row_length: int, anchors: int) -> None:
    if not 1 <= anchors <= row_length:
        raise ValueError(f"anchors must be within 1 … {row_length} (the row length), got {anchors}")
    positions = target.max_position_embeddings
    if row_length > positions:
        raise ValueError(f"rows of {row_length} tokens pass the target's {positions} positions")


def check_memory(config: DrafterConfig, rows: int, row_length: int, limit: int | None) -> None:
    """ValueError, before answers are made, if the least that a step takes passes `limit` bytes.

    These are float32 weights with gradients and a moment, and the embeddings of a device's rows;
    all that a step takes is known when it is compiled.
    """
    leaves = jax.tree.leaves(abstract_params(config))
    weights = 3 * FLOAT32 * sum(leaf.size for leaf in leaves)
    tokens = rows * row_length // jax.device_count()
    embeddings = tokens * config.hidden_size * jnp.dtype(jnp.bfloat16).itemsize
    if limit is not None and weights + embeddings > limit:
        raise ValueError(
            f"the drafter's training takes {weights / 1e9:.3g} GB, and {rows} rows of {row_length} "
            f"tokens {embeddings / 1e9:.3g} GB of each device, which has {limit / 1e9:.3g} GB: "
            "give a smaller drafter, fewer rows or shorter ones"
        )


class Lesson(NamedTuple):
    """The trainer's arguments for a drafter."""

    loss: LossFn
    start: Any  # float32 parameters
    identity: dict[str, Any]


def make_lesson(
    target: Target, config: DrafterConfig, rows: Rows, *, anchors: int, training: TrainConfig,
    objective: Objective, backend: str | None = None, start: Any = None,
) -> Lesson:  # fmt: skip
    """The loss of a drafter on these rows, with the device's best attention unless it is named.

    `start` holds the parameters to begin with; None makes a new drafter's. ValueError for settings
    that do not fit, before anything runs.
    """
    check_trainable(config)
    check_sizes(target.config, rows.tokens.shape[1], anchors)
    check_tokens(rows, target.config.vocab_size)
    check_answers(rows)
    configs: list[DecoderConfig] = [target.config, config]
    platform = jax.default_backend()
    attention = training_backend(backend, configs, training.compute_dtype, platform)
    rows_a_device = max(1, training.batch_size // jax.local_device_count())
    chunks = chunks_for(anchors, rows_a_device, config.block_size, config.vocab_size)
    blocks = Blocks(anchors=anchors, objective=objective, backend=attention, chunks=chunks)
    identity = asdict(config) | asdict(objective) | {"anchors": anchors, "attention": attention}
    loss = partial(drafter_loss, target, Drafter(config), blocks)
    if start is None:
        return Lesson(loss, init_drafter(config, training.seed), identity)
    start = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start)
    return Lesson(loss, start, identity | {"start_crc32": crc32_of(start)})


@jax.jit
def _sample(params: Any) -> Any:
    """Some numbers of each leaf: a training changes all leaves, and a copy of all is gigabytes."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1)[:: max(1, leaf.size // SAMPLED)], params)


def train_drafter(
    target: Target, target_params: Any, config: DrafterConfig,
    conversations: Iterable[Conversation], *, row_length: int, anchors: int, training: TrainConfig,
    directory: Path, should_stop: Callable[[int], bool], objective: Objective = PAPERS,
    backend: str | None = None, start: Any = None, evaluation: Evaluation | None = None,
) -> Trained:  # fmt: skip
    """Packs the conversations and trains a drafter for a frozen target; see trainer.train.

    The drafter is new, or has the parameters `start`.
    """
    rows, dropped = pack(conversations, row_length)
    lesson = make_lesson(
        target, config, rows, anchors=anchors, training=training, objective=objective,
        backend=backend, start=start,
    )  # fmt: skip
    describe(rows, dropped)
    return train(
        lesson.loss, lesson.start, target_params, rows, training, directory,
        identity=lesson.identity | {"target_crc32": crc32_of(_sample(target_params))},
        should_stop=should_stop, title="drafter", evaluation=evaluation,
    )  # fmt: skip
