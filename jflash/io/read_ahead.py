"""Rows of tensors from files to the device, as fast as the files can be read.

Each of READERS threads reads one piece at a time into new memory and waits until the device has it.
So the host holds at most READERS pieces, however large a tensor is. This file knows bytes, and no
models.
"""

import collections
import concurrent.futures
import json
import math
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PIECE = 64 * 2**20  # bytes read and moved at a time, of whole rows
READERS = 8  # threads
AHEAD = 16  # pieces under way: the device may hold that many before they are used
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
DTYPES |= {"I64": np.int64, "I32": np.int32}  # of ids, which JAX holds as int32, and of words
DTYPES |= {"I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8}  # codes


class Piece(NamedTuple):
    """Lines of a tensor, or all of it, and where they lie."""

    file: Path
    name: str
    begin: int  # in the file, bytes
    shape: tuple[int, ...]  # as stored
    dtype: np.dtype
    transposed: bool = False  # on its way to the device
    # From what is stored, here and in the pieces beside it, to numbers.
    decode: Callable[..., np.ndarray] | None = None
    beside: tuple["Piece", ...] = ()
    stride: int | None = None  # from a row to the next one, bytes, if others lie between

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def lines(self, first: int, count: int, axis: int = 0) -> "Piece":
        """Some rows, or with `axis` 1 columns, of a whole tensor."""
        row = self.nbytes // self.shape[0]
        if axis == 0:
            return self._replace(begin=self.begin + first * row, shape=(count, *self.shape[1:]))
        begin, shape = self.begin + first * self.dtype.itemsize, (self.shape[0], count)
        return self._replace(begin=begin, shape=shape, stride=row)


def find_tensors(file: Path) -> dict[str, Piece]:
    """Every tensor of floats or ids of a safetensors file, by name; its header must be valid."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return {
        name: Piece(
            file, name, 8 + size + entry["data_offsets"][0], tuple(entry["shape"]),
            np.dtype(DTYPES[entry["dtype"]]),
        )
        for name, entry in header.items()
        if entry["dtype"] in DTYPES
    }  # fmt: skip


def split_rows(tensor: Piece, unit: int = 1, growth: float = 1.0) -> list[Piece]:
    """The tensor as pieces of at most PIECE bytes, but at least `unit` rows each, in whole units.

    `growth` is the number of bytes that decoding makes of one; the limit counts them.
    """
    row = max(1, tensor.nbytes // max(1, tensor.shape[0]))
    step = max(1, int(PIECE / (row * growth)) // unit) * unit
    return [
        tensor._replace(
            begin=tensor.begin + first * row,
            shape=(min(step, tensor.shape[0] - first), *tensor.shape[1:]),
        )
        for first in range(0, tensor.shape[0], step)
    ]


def read_ahead(
    pieces: Sequence[Piece], double: str = "float32"
) -> Generator[tuple[Piece, jax.Array]]:
    """Yields the pieces in order, on the device; float64, which JAX lacks here, as `double`.

    ValueError for a file that ends too soon.
    """

    def fetch(piece: Piece) -> jax.Array:
        rows = read(piece)
        if rows.dtype == np.float64:
            rows = rows.astype(jnp.dtype(double))
        if rows.dtype == np.int64:
            rows = rows.astype(np.int32)
        return jax.block_until_ready(jax.device_put(rows.T if piece.transposed else rows))

    waiting = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(READERS)

    def oldest() -> tuple[Piece, jax.Array]:  # so that no local keeps the array alive
        piece, future = waiting.popleft()
        return piece, future.result()

    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(fetch, piece)))
            if len(waiting) == AHEAD:
                yield oldest()
        while waiting:
            yield oldest()
    finally:
        pool.shutdown(cancel_futures=True)


def read(piece: Piece) -> np.ndarray:
    """The rows of a piece, decoded, in new memory."""
    octets = np.empty(piece.nbytes, np.uint8)
    runs = [octets] if piece.stride is None else np.split(octets, piece.shape[0])
    try:
        with piece.file.open("rb", buffering=0) as stream:
            for i, run in enumerate(runs):
                if not _filled(run, stream.fileno(), piece.begin + i * (piece.stride or 0)):
                    raise ValueError(f"{piece.file} is corrupt or truncated at {piece.name}")
    except OSError as error:
        raise ValueError(f"{piece.file} cannot be read at {piece.name}: {error}") from None
    stored = octets.view(piece.dtype).reshape(piece.shape)
    return piece.decode(stored, *map(read, piece.beside)) if piece.decode else stored


def same_numbers(one: Piece, other: Piece) -> bool:
    """Whether two whole tensors hold the same, read a piece at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pieces = zip(split_rows(one), split_rows(other), strict=True)
    return all(read(a).tobytes() == read(b).tobytes() for a, b in pieces)


def _filled(octets: np.ndarray, file: int, begin: int) -> bool:
    """Reads as many bytes as there is room for; False if the file ends before."""
    view, done = memoryview(octets), 0
    while done < len(octets):
        count = os.preadv(file, [view[done:]], begin + done)
        if not count:
            return False
        done += count
    return True
