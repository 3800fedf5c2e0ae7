"""A GGUF file's header, parsed once: metadata, and where each tensor lies.

This file knows no model: the modules beside it give the keys and names their meaning.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jflash.io.foreign import refuse_pointer
from jflash.io.gguf.header import MAGIC, Stored, read_header
from jflash.io.hf_values import TEXT, WHOLE, Kind, shown


class GgufFile(NamedTuple):
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]

    def need(self, key: str) -> Any:
        """The value of a metadata key; ValueError if the file lacks it."""
        if key not in self.metadata:
            raise ValueError(f"{self.path}: the metadata lacks {key}")
        return self.metadata[key]

    def check(self, kinds: Mapping[str, Kind]) -> None:
        """ValueError for the first key of `kinds` whose value is of another kind."""
        for key, kind in kinds.items():
            value = self.metadata.get(key)
            if value is not None and not kind.holds(value):
                raise ValueError(f"{self.path}: {key} must be {kind.words}, got {shown(value)}")


def read_gguf(path: Path) -> GgufFile:
    """The header of a file; ValueError if it is no whole GGUF file of one model."""
    try:
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                refuse_pointer(path)
                raise ValueError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
            stream.seek(0)
            file = GgufFile(path, *_header(path, stream))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    file.check({"general.type": TEXT, "split.count": WHOLE})
    kind, parts = file.metadata.get("general.type", "model"), file.metadata.get("split.count", 1)
    if kind != "model":
        raise ValueError(f"{path} holds a GGUF {shown(kind)}, not a model")
    if parts > 1:
        raise ValueError(f"{path}: split.count is {parts}: merge the parts into one file")
    return file


def _header(path: Path, stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Stored]]:
    try:
        return read_header(stream, path.stat().st_size)
    except ValueError as error:
        raise ValueError(f"{path} is corrupt or truncated: {error}") from None
