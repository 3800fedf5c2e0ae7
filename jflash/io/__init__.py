"""Files in and out: the only place that knows Hugging Face, safetensors, Orbax, tokenizers."""

from jflash.io.checkpoint import (
    Checkpoint,
    load_tokenizer,
    open_checkpoint,
    resolve,
    stop_token_ids,
)
from jflash.io.convert import convert_checkpoint
from jflash.io.load import (
    PairFiles,
    configure_pair,
    configure_target,
    default_dtype,
    load_drafter,
    load_pair,
    load_target,
    load_weights,
    pair_models,
    random_drafter,
    save_checkpoint,
)
from jflash.io.text import encode_prompt

__all__ = [
    "Checkpoint",
    "PairFiles",
    "configure_pair",
    "configure_target",
    "convert_checkpoint",
    "default_dtype",
    "encode_prompt",
    "load_drafter",
    "load_pair",
    "load_target",
    "load_tokenizer",
    "load_weights",
    "open_checkpoint",
    "pair_models",
    "random_drafter",
    "resolve",
    "save_checkpoint",
    "stop_token_ids",
]
