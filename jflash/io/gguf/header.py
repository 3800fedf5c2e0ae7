"""The bytes of a GGUF header as metadata and tensors; this file knows no meaning of a key.

A header is foreign data that announces counts and lengths. Each is compared with the rest of the
file before anything of its size is allocated. A ValueError, without the file's name, refuses data
that is cut short, impossible or used by no model (arrays of arrays, more than four dimensions).
"""

import math
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_ITEMS = 2**24  # of an array: 64 times the largest vocabulary
MOST_DIMENSIONS = 4
ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
STRING, ARRAY = 8, 9
NUMBERS = {  # a value's type -> its dtype in the file
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor in the file; its shape is numpy's, the reverse of GGUF's."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int  # in the file, bytes


class _Reader:
    """Reads from the front; ValueError at the end of the file."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size, self.at = stream, size, 0

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise ValueError(f"{count} bytes are announced, {self.size - self.at} are left")
        self.at += count
        data = self.stream.read(count)
        if len(data) < count:
            raise ValueError(f"the file ends at byte {self.at - count + len(data)}")
        return data

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.bytes(dtype.itemsize), dtype)[0].item()

    def whole(self, size: int) -> int:
        return int.from_bytes(self.bytes(size), "little")

    def text(self) -> str:
        return self.bytes(self.whole(8)).decode("utf-8")

    def value(self) -> Any:
        kind = self.whole(4)
        if kind != ARRAY:
            return self._scalar(kind)
        kind, count = self.whole(4), self.whole(8)
        if count > MOST_ITEMS:
            raise ValueError(f"an array of {count} values")
        if kind == STRING:
            return [self.text() for _ in range(count)]
        dtype = np.dtype(_form(kind))
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()

    def _scalar(self, kind: int) -> Any:
        return self.text() if kind == STRING else self.number(_form(kind))


def _form(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError("an array of arrays" if kind == ARRAY else f"a value of type {kind}")
    return NUMBERS[kind]


def read_header(stream: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Metadata and tensors of a GGUF file of `size` bytes, read from its beginning."""
    reader = _Reader(stream, size)
    reader.bytes(len(MAGIC))
    version = reader.whole(4)
    if version & 0xFFFF == 0:
        raise ValueError("the other byte order is not supported")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version} is not supported, only {VERSIONS}")
    num_tensors, num_values = reader.whole(8), reader.whole(8)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        name = reader.text()
        if name in metadata:
            raise ValueError(f"{name!r} is given twice")
        metadata[name] = reader.value()
    infos: dict[str, tuple] = {}
    for _ in range(num_tensors):
        name = reader.text()
        if name in infos:
            raise ValueError(f"tensor {name!r} is given twice")
        infos[name] = _tensor_info(reader, name)
    begin = _aligned(reader.at, metadata)
    return metadata, {name: _placed(name, info, begin, size) for name, info in infos.items()}


def _tensor_info(reader: _Reader, name: str) -> tuple[GGMLQuantizationType, tuple[int, ...], int]:
    """A tensor's type, shape and offset."""
    dimensions = reader.whole(4)
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed([reader.whole(8) for _ in range(dimensions)]))
    return GGMLQuantizationType(reader.whole(4)), shape, reader.whole(8)


def _aligned(end: int, metadata: dict[str, Any]) -> int:
    """Where the tensors' data begins, after a header of `end` bytes."""
    unit = metadata.get("general.alignment", ALIGNMENT)
    if type(unit) is not int or unit < 1 or unit & (unit - 1):
        raise ValueError(f"general.alignment {unit!r} is no power of two")
    return -(-end // unit) * unit


def _placed(name: str, info: tuple, begin: int, size: int) -> Stored:
    """The tensor, if all of its bytes are in the file."""
    kind, shape, offset = info
    block, width = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise ValueError(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {block}")
    if begin + offset + math.prod(shape) // block * width > size:
        raise ValueError(f"tensor {name!r} ends after the file's {size} bytes")
    return Stored(kind, shape, begin + offset)
