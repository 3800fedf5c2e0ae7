"""Files in and out: the only place that knows Hugging Face, safetensors, Orbax, tokenizers.

The names below are imported when they are first used: a process that only turns text into tokens
needs neither JAX nor a model.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_HOMES = "text", "checkpoint", "load", "convert"  # the one without JAX first


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"jflash.io.{home}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'jflash.io' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
