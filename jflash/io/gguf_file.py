"""A GGUF file's header by the `gguf` library: metadata, and where each tensor lies.

Knows no model: what the keys and names mean is for the modules beside this one.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGMLQuantizationType, GGUFReader

MAGIC = b"GGUF"


class Stored(NamedTuple):
    """A tensor in the file; the shape has its rows first, as everywhere outside GGUF."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int  # in the file, bytes


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
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        # The library slices past the end: what it raises then says nothing of truncation.
        raise ValueError(f"{path} is corrupt or truncated: {error}") from None
    if reader.byte_order != "I":
        raise ValueError(f"{path}: a GGUF file in the other byte order is not supported")
    if metadata.get("general.type", "model") != "model":
        raise ValueError(f"{path} holds a GGUF {metadata['general.type']}, not a model")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{path}: split.count is {metadata['split.count']}: merge the parts into one file"
        )
    tensors = {
        tensor.name: Stored(
            tensor.tensor_type, tuple(int(n) for n in reversed(tensor.shape)), tensor.data_offset
        )
        for tensor in reader.tensors
    }
    return GgufFile(path, metadata, tensors)
