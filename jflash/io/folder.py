"""A checkpoint's folder without its weights: config, tokenizer, stop ids.

Safetensors and Orbax extend it with the weights.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jflash.io.foreign import named, refuse_pointer
from jflash.io.hf_config import read_json
from jflash.io.hf_values import checked
from jflash.io.tokenizer_file import tokenizer_of

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# (dtype, progress, place=…) -> the parameters, already checked; dtype None keeps the stored one.
Fill = Callable[..., dict]
# A leaf by its path, whole on one device -> the same on the devices that share the model.
Place = Callable[[str, Any], Any]  # a path, and an array or a kept kernel


def as_it_lies(path: str, leaf: Any) -> Any:
    return leaf


COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json"),
)
MORE_TEMPLATES = "additional_chat_templates/*.jinja"  # such as tool_use, beside the default one


@dataclass(frozen=True)
class Folder:
    path: Path

    @functools.cached_property
    def raw(self) -> dict[str, Any]:
        """config.json, read once; ValueError if it is missing or no JSON object."""
        return read_json(self.path / "config.json")

    def config[C](self, read: Callable[[dict[str, Any]], C]) -> C:
        """The config through one of hf_config's readers; its errors name the checkpoint."""
        return read_config(self.path, self.raw, read)

    @property
    def quantised(self) -> str | None:
        return None

    def companions(self) -> dict[str, bytes]:
        """The files that describe the model, by name; a converted checkpoint has the same."""
        there = [self.path / name for name in COMPANIONS if (self.path / name).exists()]
        there += sorted(self.path.glob(MORE_TEMPLATES))
        return {str(file.relative_to(self.path)): file.read_bytes() for file in there}

    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer, supported or not."""
        return any((self.path / name).exists() for name in TOKENIZERS)

    def tokenizer(self) -> Any:
        """The tokenizer, as transformers'; ValueError if there is none or it does not load."""
        check_tokenizer(self.path, self.has_tokenizer())
        for name in TOKENIZERS:
            refuse_pointer(self.path / name)
        with named(f"the tokenizer in {self.path} does not load"):
            return tokenizer_of(self.path)

    def stop_ids(self, tokenizer: Any = None) -> list[int]:
        """End-of-text ids: generation_config's, else config's, else the tokenizer's, else none."""
        file, ids = self.path / "generation_config.json", None
        if file.exists():
            ids = read_config(file, read_json(file), _stops)
        if ids is None and (file := self.path / "config.json").exists():
            ids = read_config(file, self.raw, _stops)
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            return [int(tokenizer.eos_token_id)]
        return []


def _stops(raw: dict[str, Any]) -> int | list[int] | None:
    """A config's end-of-text ids; those of its text model if it says none itself."""
    ids = checked(raw, ["eos_token_id", "text_config"]).get("eos_token_id")
    text = raw.get("text_config")
    return _stops(text) if ids is None and text else ids


def read_config[C](path: Path, raw: dict[str, Any], read: Callable[[dict[str, Any]], C]) -> C:
    """A config.json through a reader whose errors do not name the file."""
    try:
        return read(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_tokenizer(path: Path, there: bool) -> None:
    """ValueError if a checkpoint has no tokenizer."""
    if not there:
        raise ValueError(
            f"{path} holds no tokenizer: text needs one, token ids (--prompt-ids) do not"
        )
