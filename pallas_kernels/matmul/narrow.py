"""Tiles of products with few columns: those of a small model, and a device's part of a larger one.

The general tiles would leave multiprocessors idle there, or fill a last turn badly. So a CTA reads
more at a time, has fewer rows or columns, or one piece of K. What won for the products of Qwen3-8B
and their parts on 2 and 4 devices, at 16, 128 and 512 rows, on an H200; 32 and 64 rows have the
tiles of 16, most of which won there too (benchmarks/h200-part-tiles.json). Knows no jax.
"""

import dataclasses

from pallas_kernels.matmul.tuning import (
    SHORT_K,
    SMS,
    WALKED,
    WARPGROUP_ROWS,
    Tuning,
    make_plan,
    with_ring,
)

# For up to 64 rows, by the programs that 64 columns each would make at most: a program's columns,
# step over K, stages and warps. 32B's products gain as well.
_FEW_ROWS: dict[str, tuple[tuple[int, tuple[int, int, int, int]], ...]] = {
    "gate_up": ((64, (32, 64, 8, 4)), (127, (64, 128, 4, 8))),
    "sums": (
        *((32, (16, 256, 4, 4)), (64, (32, 128, 8, 4))),
        *((127, (64, 128, 6, 4)), (132, (64, 128, 5, 4)), (144, (64, 128, 4, 4))),
    ),
}
# And of 16 rows by so many programs: Qwen3-32B's qkv, out and down over two take 21.5, 18.1 and
# 49.6 µs so in a loop over weights, and 23.7, 18.5 and 51.9 by 128 of K
# (benchmarks/h200-few-columns.json).
_DEEP, _DEEP_PROGRAMS = (64, 256, 5, 4), range(65, 128)
# Programs and rows at most, and K of each program at least, that `few_columns` takes sooner, and
# its slots of tiles. With a fourth of Qwen3-32B's columns qkv, out and down of 16 rows take 14.0,
# 13.4 and 32.8 µs so, and 15.4, 17.6 and 41.4 by Triton; of 64 rows 17.5, 16.7 and 34.3, and 17.2,
# 15.3 and 36.2. A half of Qwen3-8B's down, 64 programs, takes 22.5 and 20.4 (the same file).
_FEW_PROGRAMS, _MOST_ROWS, _LONG_PIECE = 48, 32, 4096
_RING = (10, 2)
# For more than WALKED rows: a CTA's rows and columns, and whether it walks all pieces of K.
_SHORT = ((64, 192, True), (64, 128, True), (64, 192, False), (64, 128, False))
_LONG = ((64, 256, False), (128, 64, False))
_APART = 1024  # of K, the least that a CTA of its own takes: its sums are written and read again
_LARGE = 128 * 128
_FILLED = 112  # CTAs, of SMS
_FILLED_BY_GATES = 96
# Times as long as 64 rows take 128 rows by 256 columns of gate and up. In several turns two CTAs
# share what they read of these columns: in loops of 50 ms 512 and 1,024 rows take 169 and 326 µs
# so, and 173 and 337 each by itself (benchmarks/h200-long-loops.json).
_TALLER = 1.8


def few_rows_sizes(
    op: str, rows: int, length: int, programs: int
) -> tuple[int, int, int, int] | None:
    """Columns, step over K, stages and warps where 64 columns a program make so few of them, each
    of which sums `length` of K."""
    if op != "gate_up" and rows <= 16 and length % _DEEP[1] == 0 and programs in _DEEP_PROGRAMS:
        return _DEEP
    rules = _FEW_ROWS.get(op, _FEW_ROWS["sums"])
    sizes = next((sizes for most, sizes in rules if programs <= most), None)
    return sizes if sizes and length % sizes[1] == 0 else None


def few_columns_sizes(rows: int, length: int, programs: int) -> tuple[int, int] | None:
    """Slots and tiles along K of the kernel for few columns, where each program sums `length`."""
    many = rows > _MOST_ROWS or programs > _FEW_PROGRAMS
    return None if many or length < _LONG_PIECE or length % (64 * _RING[1]) else _RING


def narrow_tuning(op: str, M: int, K: int, N: int, pieces: int, general: Tuning) -> Tuning:
    """The tile for 65 rows or more: `general` unless another one fills the GPU better."""
    if op == "gate_up":
        return _of_gates(M, K, N, general)
    if op not in ("matmul", "residual"):
        return general
    if M > WALKED:
        large = general.block_m * general.block_n >= _LARGE
        if large and _filled(op, M, K, N, general):
            return general
        sizes = _SHORT if K <= SHORT_K else _LONG
        apart = K // pieces >= _APART
        ways = [(m, n, pieces if walks else 1) for m, n, walks in sizes if walks or apart]
        tilings = (with_ring(op, m, n, walk, pieces // walk) for m, n, walk in ways)
        return next((t for t in tilings if t and _filled(op, M, K, N, t)), general)
    deep = general.split_k > 1 and general.block_n <= 64 and M <= 2 * WARPGROUP_ROWS
    tuning = with_ring(op, WARPGROUP_ROWS, 64, 1, pieces, 128) if deep else None
    return tuning if tuning and _ctas(op, M, K, N, tuning) else general


def _of_gates(M: int, K: int, N: int, general: Tuning) -> Tuning:
    low = with_ring("gate_up", WARPGROUP_ROWS, 256, 1, 1)
    assert low is not None, "its ring is smaller than that of 128 rows"
    few = _ctas("gate_up", M, K, N, low)
    if not few:
        return general
    if M <= 2 * WARPGROUP_ROWS:
        return low if _FILLED_BY_GATES <= few <= SMS else general
    if M <= WALKED or (general.block_m, general.block_n) != (128, 256):
        return general
    many = _ctas("gate_up", M, K, N, general)
    both = dataclasses.replace(general, cluster_m=2)
    if many > SMS:
        if _TALLER * _turns(many) > 1.05 * _turns(few):
            return low
        return both if _ctas("gate_up", M, K, N, both) else general
    paired = [both]
    narrower = with_ring("gate_up", 128, 192, 1, 1)
    if narrower is not None:
        paired.insert(0, dataclasses.replace(narrower, cluster_m=2))
    fitting = (t for t in paired if _FILLED_BY_GATES <= _ctas("gate_up", M, K, N, t) <= SMS)
    return next(fitting, general)


def _turns(ctas: int) -> int:
    return -(-ctas // SMS)


def _filled(op: str, M: int, K: int, N: int, tuning: Tuning) -> bool:
    """Whether its CTAs take one turn and leave few multiprocessors idle."""
    return _FILLED <= _ctas(op, M, K, N, tuning) <= SMS


def _ctas(op: str, M: int, K: int, N: int, tuning: Tuning) -> int:
    """Of the shape, had each one tile; 0 if the tile does not divide it."""
    if N % tuning.block_n:
        return 0
    try:
        plan = make_plan("matmul" if tuning.split_k > 1 else op, M, K, N, tuning)
    except ValueError:
        return 0
    return plan.columns * plan.row_groups * tuning.cluster_m * tuning.cluster_n
