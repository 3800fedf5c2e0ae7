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
AHEAD = 32  # pieces under way: the device may hold that many before they are used
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
DTYPES |= {"I64": np.int64, "I32": np.int32}  # of ids, which JAX holds as int32


class Piece(NamedTuple):
    """Whole rows of a tensor, or all of it, and where they lie."""

    file: Path
    name: str
    begin: int  # in the file, bytes
    shape: tuple[int, ...]  # as stored
    dtype: np.dtype
    transposed: bool = False  # on its way to the device
    decode: Callable[[np.ndarray], np.ndarray] | None = None  # from stored rows to numbers

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    rows = np.empty(piece.nbytes, np.uint8)
    view, done = memoryview(rows), 0
    try:
        with piece.file.open("rb", buffering=0) as stream:
            while done < piece.nbytes:
                count = os.preadv(stream.fileno(), [view[done:]], piece.begin + done)
                if not count:
                    raise ValueError(f"{piece.file} is corrupt or truncated at {piece.name}")
                done += count
    except OSError as error:
        raise ValueError(f"{piece.file} cannot be read at {piece.name}: {error}") from None
    stored = rows.view(piece.dtype).reshape(piece.shape)
    return piece.decode(stored) if piece.decode else stored
