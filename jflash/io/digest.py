"""A name for the bytes of a checkpoint: another model at the same path has another one.

Reads the configuration whole and of large weights a sample, so that a model of many gigabytes is
named in less than a second. Knows no format: files and where their headers lie.
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
    """Hexadecimal digits for a checkpoint's folder or GGUF file, of its configuration alone on
    request: names, sizes and content of its files. A copy elsewhere has the same ones.

    Of files above 64 MiB the first 4 MiB count, and 256 pieces of 16 KiB from the first byte to the
    last: a training changes all of them, an edit of a few numbers may change none.
    """
    found = hashlib.sha256()
    for name, file in _files(source, weights):
        size = file.stat().st_size
        found.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for begin, length in _sample(size):
                stream.seek(begin)
                found.update(stream.read(length))
    return found.hexdigest()[:DIGITS]


def _files(source: Path, weights: bool) -> Iterator[tuple[str, Path]]:
    """What counts of a checkpoint, by names that do not depend on its place."""
    if not source.is_dir():
        yield "", source
        return
    patterns = CONFIGS + (WEIGHTS if weights else ())
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                yield str(file.relative_to(source)), file


def _sample(size: int) -> Iterator[tuple[int, int]]:
    """Begin and length of the pieces of a file that are read."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    yield 0, HEAD_BYTES
    for i in range(PIECES):
        yield (size - PIECE_BYTES) * i // (PIECES - 1), PIECE_BYTES
