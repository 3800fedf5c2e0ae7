"""A drafter for any supported target: its configuration, its data, its training."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jflash.config import DrafterConfig, TargetConfig, default_target_layer_ids
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.training.data import Conversation, check_tokens, describe, pack
from jflash.training.drafter_loss import drafter_loss, init_drafter
from jflash.training.trainer import TrainConfig, Trained, train


def drafter_config_for(
    target: TargetConfig,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...] | None = None,
) -> DrafterConfig:
    """A drafter with its target's sizes, tapping the published rule's layers unless told others."""
    if num_layers < 1:
        raise ValueError(f"a drafter needs at least 1 layer, got {num_layers}")
    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(target.num_layers, num_layers)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_position_embeddings=target.max_position_embeddings,
        # A drafter is of Qwen3's shape whatever its target: norms on q and k, no biases.
        qk_norm=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        num_target_layers=target.num_layers,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )


def default_mask_token_id(tokenizer: Any, vocab_size: int) -> int:
    """The tokenizer's mask token, else the first id it leaves unused; ValueError without either."""
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    raise ValueError(
        f"the tokenizer uses all {vocab_size} ids and has no mask token: give --mask-token-id"
    )


def read_records(
    path: Path, encode: Callable[[str], list[int]], encode_answer: Callable[[str], list[int]]
) -> list[Conversation]:
    """Lines {"prompt" or "prompt_ids", optionally "answer" or "answer_ids"} as token ids.

    A line without an answer gets an empty one. ValueError names the line that does not fit.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict) or not ("prompt" in record or "prompt_ids" in record):
            raise ValueError(f'{where} has neither "prompt" nor "prompt_ids"')
        prompt = _ids(record, "prompt", encode, where)
        if not prompt:
            raise ValueError(f"{where}: the prompt is empty")
        found.append(Conversation(prompt, _ids(record, "answer", encode_answer, where)))
    if not found:
        raise ValueError(f"{path} holds no record")
    return found


def _ids(record: dict, name: str, encode: Callable[[str], list[int]], where: str) -> list[int]:
    ids, text = record.get(f"{name}_ids"), record.get(name)
    if ids is not None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ValueError(f"{where}: {name}_ids must be a list of integers")
        return ids
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: {name} must be a string, got {text!r}")
    return encode(text) if text else []


def train_drafter(
    target: Target,
    target_params: Any,
    config: DrafterConfig,
    conversations: Iterable[Conversation],
    *,
    row_length: int,
    anchors: int,
    training: TrainConfig,
    directory: Path,
    should_stop: Callable[[int], bool],
) -> Trained:
    """Packs the conversations and trains a new drafter for a frozen target; see trainer.train."""
    if not 1 <= anchors <= row_length:
        raise ValueError(f"anchors must be within 1 … {row_length} (the row length), got {anchors}")
    positions = target.config.max_position_embeddings
    if row_length > positions:
        raise ValueError(f"rows of {row_length} tokens pass the target's {positions} positions")
    rows, dropped = pack(conversations, row_length)
    check_tokens(rows, target.config.vocab_size)
    describe(rows, dropped)
    loss = partial(drafter_loss, target, Drafter(config), anchors)
    return train(
        loss, init_drafter(config, training.seed), target_params, rows, training, directory,
        identity=asdict(config) | {"anchors": anchors}, should_stop=should_stop, title="drafter",
    )  # fmt: skip
