"""How the Mosaic GPU kernel cuts a GEMM: the record, the plan it makes of a shape, and the rule.

Ops are "matmul", "residual", "gate_up", "head_argmax" and "head_logits"; N counts w's output
columns (2F for gate_up, V for a head). Knows no jax: a ValueError here is a refusal before anything
is traced.
"""

import dataclasses
import math
from typing import NamedTuple

WARPGROUP_ROWS = 64  # M of a wgmma: one consumer warpgroup for each
SHARED_MEMORY = 232_448 - 2_048  # bytes a CTA may have, less barriers and reduction scratch
SMS = 132
COLUMNS = 64  # if these divide a matrix's columns, so do the rule's tiles
MOST_WALKING = 192  # columns of a tile whose pieces a CTA adds in registers
LEAST_SWIZZLE = 16  # columns of bfloat16; those of a matrix are whole swizzles
WASTE = 16  # columns, for each that a last tile may compute past the end
ARGMAX = ("head_argmax", "head_confidence")  # heads whose logits are not written
HEADS = (*ARGMAX, "head_logits")  # whose weights lie as [N, K], and any number of columns do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """A CTA's tile is block_m rows by block_n columns; block_k is one slot of the ring."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    split_k: int = 1  # pieces of K by separate CTAs
    walk: int = 1  # pieces of K that a CTA takes in turn, adding each to the sum of those before
    cluster_m: int = 1
    cluster_n: int = 1
    sms: int = SMS  # CTAs to start at most: speed only, never a result's bits

    def __post_init__(self):
        if min(self.stages, self.split_k, self.walk, self.cluster_m, self.cluster_n, self.sms) < 1:
            raise ValueError(f"every count must be at least 1: {self}")
        if self.block_m not in (64, 128, 192):
            raise ValueError(f"block_m must be 64, 128 or 192: {self}")
        if self.block_n < 16 or self.block_n % 16 or self.block_k not in (64, 128):
            raise ValueError(f"block_n must divide by 16, block_k be 64 or 128: {self}")
        if self.cluster_m * self.cluster_n > 8:
            raise ValueError(f"a cluster has at most 8 CTAs: {self}")

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the tiles in flight."""
        return self.stages * (self.block_m + self.block_n) * self.block_k * 2


class Plan(NamedTuple):
    """A shape cut into tiles. Clusters of CTAs take whole row groups and share out the columns."""

    op: str
    tuning: Tuning
    M: int
    N: int
    halves: int  # gate_up keeps the gate's and the up's columns apart: two accumulators
    half_n: int  # columns of one of them
    swizzle: int  # bytes, of x's and w's tiles alike
    row_groups: int  # of cluster_m tiles
    columns: int  # of cluster_n tiles, once for every K split
    clusters: int  # that share a row group's columns
    k_steps: int  # of one piece of K
    k_minor: bool  # w lies as [N, K]

    @property
    def consumers(self) -> int:
        return self.tuning.block_m // WARPGROUP_ROWS

    @property
    def split(self) -> bool:
        return self.tuning.split_k > 1

    @property
    def out_bytes(self) -> int:
        return 4 if self.split or self.op in HEADS else 2

    @property
    def shared_memory(self) -> int:
        """Bytes: the ring, and the result's tile, which a residual takes before."""
        tiles = 0 if self.op in ARGMAX else 1
        return self.tuning.ring_bytes + tiles * self.tuning.block_m * self.half_n * self.out_bytes


def make_plan(op: str, M: int, K: int, N: int, tuning: Tuning) -> Plan:
    """Cuts the shape, or says with a ValueError why this tuning cannot."""
    t, is_head = tuning, op in HEADS
    what = f"mosaic_gpu {op} of [{M}, {K}] by {N} columns with {t}"
    halves = 2 if op == "gate_up" else 1
    half_n, row_tiles = t.block_n // halves, math.ceil(M / t.block_m)
    swizzle_n = t.block_k if is_head else half_n  # the head lies with K minor
    if K % (t.block_k * t.split_k * t.walk):
        raise ValueError(f"{what}: K must divide by block_k * split_k * walk")
    # TMA fills columns past N with zeros and clips them on the way out; halves have neighbours.
    past = 0 if is_head else -N % (t.block_n * t.cluster_n)
    ragged = N % LEAST_SWIZZLE == 0 and past * WASTE <= N
    if past and (not ragged or halves > 1 or t.cluster_n > 1):
        raise ValueError(f"{what}: N must divide by block_n * cluster_n, or nearly")
    if is_head and t.split_k * t.walk > 1:
        raise ValueError(f"{what}: a head cannot be split over K")
    if half_n % 8 or half_n > 256 or swizzle_n % 16:
        raise ValueError(f"{what}: wgmma takes up to 256 columns, in multiples of 16")
    if t.walk > 1 and t.block_n > MOST_WALKING:
        raise ValueError(f"{what}: registers hold sums of {MOST_WALKING} columns beside a piece's")
    if row_tiles % t.cluster_m:
        raise ValueError(f"{what}: {row_tiles} row tiles do not fill clusters of {t.cluster_m}")
    columns = math.ceil(N / (t.block_n * t.cluster_n)) * t.split_k
    row_groups = row_tiles // t.cluster_m
    room = t.sms // (t.cluster_m * t.cluster_n) // row_groups
    swizzle = 2 * math.gcd(swizzle_n, 64, 0 if is_head else N)
    plan = Plan(
        op=op, tuning=t, M=M, N=N, halves=halves, half_n=half_n,
        swizzle=swizzle, row_groups=row_groups, columns=columns,
        clusters=min(columns, max(1, room)), k_steps=K // t.block_k // t.split_k // t.walk,
        k_minor=is_head,
    )  # fmt: skip
    if plan.shared_memory > SHARED_MEMORY:
        raise ValueError(f"{what}: {plan.shared_memory} bytes of shared memory, of {SHARED_MEMORY}")
    return plan


# Tiles of the canonical form by rows, the largest first: what won in chains of a layer's products
# of Qwen3-8B's shapes on an H200 (jax 0.11.2, 2026-11-22). 512 rows of qkv take one turn of 192
# columns, and two of 128.
_NARROW = ((128, 64), (64, 64), (64, 32))
_CANONICAL = {
    "head_argmax": {128: ((64, 192),), 256: ((128, 192),), math.inf: ((128, 192),)},
    "head_logits": {128: ((64, 128),), 256: ((128, 128),), math.inf: ((128, 128),)},
    "gate_up": {
        128: ((64, 128), (64, 64), (64, 32)),
        256: ((128, 128), *_NARROW),
        math.inf: ((128, 256), (128, 128), *_NARROW),
    },
    "matmul": {
        128: ((64, 128), (64, 64), (64, 32)),
        256: ((128, 128), *_NARROW),
        math.inf: ((128, 192), (128, 128), *_NARROW),
    },
}
_FULL = 96  # CTAs
WIDE = (128, 128)  # of 128 rows and many columns: [5120, 16480] 64.9 µs, by 64 rows 77.8
WALKED = 256  # rows; with more a CTA takes the pieces of K in turn
# And with 65 to 128 rows, if K is not long and these fill the GPU, (block_n, block_k): µs of 128
# rows so and by a CTA for each piece, on an H200 (jax 0.11.2, 2026-11-23): [4096, 6144] 23.1 and
# 26.3, [4096, 4096] 16.5 and 20.2, but [12288, 4096] 39.5 and 37.6.
SHORT_K, _WALKING = 8192, ((128, 64), (64, 128))
# Of 64 rows, for pieces whose CTAs would take a second turn that few of them fill. A multiple of 64
# columns, since tiles in swizzles of 64 bytes take twice the time in shared memory.
ONE_TURN = 192


def canonical_tuning(op: str, M: int, K: int, N: int, pieces: int) -> Tuning:
    """A tile that sums K in so many pieces: the general one, or of pieces one that takes one turn.

    ValueError: the kernel cannot serve the shape.
    """
    general = _general(op, M, K, N, pieces)
    if pieces == 1 or not WARPGROUP_ROWS < M <= 2 * WARPGROUP_ROWS:
        return general
    wide = with_ring(op, WARPGROUP_ROWS, ONE_TURN, 1, pieces)
    plans = (_plan("matmul", M, K, N, t, ragged=True) for t in (general, wide) if t)
    tiles = [plan.columns * plan.row_groups if plan else 0 for plan in plans]
    return wide if wide and tiles[0] > SMS >= tiles[-1] >= _FULL else general


def _general(op: str, M: int, K: int, N: int, pieces: int) -> Tuning:
    """The largest tile whose CTAs fill the GPU, of those that sum K in so many pieces.

    If its CTAs would take turns, a larger one that fills half of it is as fast, in one turn.
    Up to WALKED rows pieces go to separate CTAs, whose sums are written and read again, but for
    _WALKING; from there on a CTA walks them. ValueError: the kernel cannot serve the shape.
    """
    by_rows = _CANONICAL["matmul" if op == "residual" else op]
    tiles = next(tiles for most, tiles in by_rows.items() if most >= M)
    walk = pieces if M > WALKED else 1
    if op == "matmul" and pieces == 1 and M <= 128:
        tiles = (WIDE, *tiles) if N // WIDE[1] >= _FULL else tiles
    found = at_once = None
    if pieces > 1 and M <= 128 and K <= SHORT_K:
        for block_n, block_k in _WALKING:
            tuning = with_ring(op, 64, block_n, pieces, 1, block_k)
            plan = None if tuning is None else _plan(op, M, K, N, tuning)
            if plan is not None and plan.columns * plan.row_groups >= _FULL:
                return plan.tuning
    for block_m, block_n in tiles:
        tuning = with_ring(op, block_m, block_n, walk, pieces // walk)
        if tuning is None:
            continue
        plan = _plan(op if pieces == walk else "matmul", M, K, N, tuning)
        if plan is None:
            continue
        found = tuning
        if plan.columns * plan.row_groups >= _FULL:
            return at_once if at_once and plan.columns > plan.clusters else tuning
        if plan.columns * plan.row_groups >= SMS // 2:
            at_once = tuning
    if found is None:
        raise ValueError(f"canonical {op}: no tile divides [{M}, {K}] by {N} columns")
    return found


def _plan(op: str, M: int, K: int, N: int, tuning: Tuning, ragged: bool = False) -> Plan | None:
    """None if it does not divide the shape; only `ragged` ones leave a part tile of whole 64s."""
    if not ragged and op not in HEADS and N % COLUMNS == 0 and N % tuning.block_n:
        return None
    try:
        return make_plan(op, M, K, N, tuning)
    except ValueError:
        return None


_RESULT_BYTES = {"head_argmax": 0, "head_logits": 4}


def with_ring(
    op: str, block_m: int, block_n: int, walk: int, split: int, block_k: int = 64
) -> Tuning | None:
    """A tile with as many stages as fit beside what its result takes; None if that is no ring."""
    half = block_m * block_n // (2 if op == "gate_up" else 1)
    taken = half * (4 if split > 1 else _RESULT_BYTES.get(op, 2))
    stages = min(640 // block_k, (SHARED_MEMORY - taken) // ((block_m + block_n) * block_k * 2))
    if stages < 3:
        return None
    return Tuning(
        block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, split_k=split, walk=walk
    )
