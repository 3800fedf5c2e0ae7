"""A GGUF file's header, parsed once: metadata, and where each tensor lies.

Knows no model: what the keys and names mean is for the modules beside this one.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jflash.io.gguf_header import MAGIC, Stored, read_header
from jflash.io.hf_values import TEXT, WHOLE, Kind, shown


class GgufFile(NamedTuple):
    """A header, only read: it is shared by all who ask for the same file."""

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


def is_gguf(path: Path) -> bool:
    """Whether a target's place means one GGUF file."""
    return path.suffix == ".gguf" and not path.is_dir()


def open_gguf(path: Path) -> GgufFile:
    """The header of a file, parsed once; ValueError if it is no whole GGUF file of one model."""
    try:
        status = path.stat()
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return _parse(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _parse(path: Path, size: int, changed: int) -> GgufFile:
    """`size` and `changed` tell a file from the one that had its name before."""
    try:
        with path.open("rb") as stream:
            metadata, tensors = read_header(stream, size)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is corrupt or truncated: {error}") from None
    file = GgufFile(path, metadata, tensors)
    file.check({"general.type": TEXT, "split.count": WHOLE})
    if metadata.get("general.type", "model") != "model":
        raise ValueError(f"{path} holds a GGUF {shown(metadata['general.type'])}, not a model")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{path}: split.count is {metadata['split.count']}: merge the parts into one file"
        )
    return file
