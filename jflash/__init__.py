"""DFlash speculative decoding in JAX: one compiled fixed-shape step, lossless bit for bit.

The names below are imported when they are first used, so that a command prints its help at once.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jflash.system import sources as _sources  # noqa: F401  # looks at all files before one is imported

if TYPE_CHECKING:
    from jflash.generate import Chunk, Generation, Pair, generate, stream
    from jflash.io import encode_prompt, load_pair, load_tokenizer, stop_token_ids
    from jflash.records.decoding import Sampling
    from jflash.serving.engine import Engine
    from jflash.serving.request import Request
    from jflash.serving.texts import Answer, TextReader, answers

_HOMES = {
    **dict.fromkeys(("Chunk", "Generation", "Pair", "generate", "stream"), "jflash.generate"),
    **dict.fromkeys(("encode_prompt", "load_pair", "load_tokenizer"), "jflash.io"),
    "stop_token_ids": "jflash.io",
    "Engine": "jflash.serving.engine",
    "Request": "jflash.serving.request",
    **dict.fromkeys(("Answer", "TextReader", "answers"), "jflash.serving.texts"),
    "Sampling": "jflash.records.decoding",
}

__all__ = [
    "Answer",
    "Chunk",
    "Engine",
    "Generation",
    "Pair",
    "Request",
    "Sampling",
    "TextReader",
    "answers",
    "encode_prompt",
    "generate",
    "load_pair",
    "load_tokenizer",
    "stop_token_ids",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jflash' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing the module jflash.generate must not hide the function jflash.generate."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
