"""A digest of a checkpoint's bytes: it changes when another model takes the path.

It reads the configuration whole and a sample of large weights, which takes less than a second for a
model of many gigabytes. This file knows no format, only files and where their headers lie.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "orbax/**/*")
CONFIGS = ("config.json", "generation_config.json")
WHOLE_BYTES = 2**26  # of a file that is read whole
PIECES, PIECE_BYTES = 256, 2**14  # of a larger one, beside its head with names, shapes and offsets
HEAD_BYTES = 2**22
DIGITS = 16


def checkpoint_digest(source: Path, weights: bool = True) -> str:
    """Hexadecimal digits by names, sizes and content of the files of a folder or GGUF file.

    A copy elsewhere has the same digits. Without `weights` only the configuration counts. Of a file
    above 64 MiB the first 4 MiB count, and 256 pieces of 16 KiB spread over all of it: training
    changes all of them, but an edit of a few numbers can go unnoticed.
    """
    digest = hashlib.sha256()
    for name, file in _files(source, weights):
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for begin, length in _sample(size):
                stream.seek(begin)
                digest.update(stream.read(length))
    return digest.hexdigest()[:DIGITS]


def _files(source: Path, weights: bool) -> Iterator[tuple[str, Path]]:
    """The files that count, by names that do not depend on the checkpoint's place."""
    if not source.is_dir():
        yield "", source
        return
    patterns = CONFIGS + (WEIGHTS if weights else ())
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                yield str(file.relative_to(source)), file


def _sample(size: int) -> Iterator[tuple[int, int]]:
    """Begin and length of each piece that is read."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    yield 0, HEAD_BYTES
    for i in range(PIECES):
        yield (size - PIECE_BYTES) * i // (PIECES - 1), PIECE_BYTES
