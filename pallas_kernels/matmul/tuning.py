"""How the Mosaic GPU kernel cuts a GEMM: the record, the plan it makes of a shape, and the table.

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
HEADS = ("head_argmax", "head_logits")  # whose weights lie as [N, K], and any number of columns do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """A CTA's tile is block_m rows by block_n columns; block_k is one slot of the ring."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    split_k: int = 1  # pieces of K by CTAs of their own
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

    @property
    def consumers(self) -> int:
        return self.tuning.block_m // WARPGROUP_ROWS

    @property
    def split(self) -> bool:
        return self.tuning.split_k > 1

    @property
    def is_head(self) -> bool:
        return self.op in HEADS

    @property
    def out_bytes(self) -> int:
        return 4 if self.split or self.is_head else 2

    @property
    def shared_memory(self) -> int:
        """Bytes: the ring, the result's tile, which a residual takes before, and sums of pieces."""
        tiles = 0 if self.op == "head_argmax" else 1
        tile = self.tuning.block_m * self.half_n
        sums = 4 * tile * self.halves if self.tuning.walk > 1 else 0
        return self.tuning.ring_bytes + tiles * tile * self.out_bytes + sums


def make_plan(op: str, M: int, K: int, N: int, tuning: Tuning) -> Plan:
    """Cuts the shape, or says with a ValueError why this tuning cannot."""
    t, is_head = tuning, op in HEADS
    what = f"mosaic_gpu {op} of [{M}, {K}] by {N} columns with {t}"
    halves = 2 if op == "gate_up" else 1
    half_n, row_tiles = t.block_n // halves, math.ceil(M / t.block_m)
    swizzle_n = t.block_k if is_head else half_n  # the head lies with K minor
    if K % (t.block_k * t.split_k * t.walk):
        raise ValueError(f"{what}: K must divide by block_k * split_k * walk")
    if not is_head and N % (t.block_n * t.cluster_n):
        raise ValueError(f"{what}: N must divide by block_n * cluster_n")
    if is_head and t.split_k * t.walk > 1:
        raise ValueError(f"{what}: a head cannot be split over K")
    if half_n % 8 or half_n > 256 or swizzle_n % 16:
        raise ValueError(f"{what}: wgmma takes up to 256 columns, in multiples of 16")
    if row_tiles % t.cluster_m:
        raise ValueError(f"{what}: {row_tiles} row tiles do not fill clusters of {t.cluster_m}")
    columns = math.ceil(N / (t.block_n * t.cluster_n)) * t.split_k
    row_groups = row_tiles // t.cluster_m
    room = t.sms // (t.cluster_m * t.cluster_n) // row_groups
    plan = Plan(
        op=op, tuning=t, M=M, N=N, halves=halves, half_n=half_n,
        swizzle=2 * math.gcd(swizzle_n, 64), row_groups=row_groups, columns=columns,
        clusters=min(columns, max(1, room)), k_steps=K // t.block_k // t.split_k // t.walk,
    )  # fmt: skip
    if plan.shared_memory > SHARED_MEMORY:
        raise ValueError(f"{what}: {plan.shared_memory} bytes of shared memory, of {SHARED_MEMORY}")
    return plan


def _t(block_m, block_n, block_k, stages, split_k=1, cluster_m=1, cluster_n=1) -> Tuning:
    return Tuning(
        block_m=block_m, block_n=block_n, block_k=block_k, stages=stages,
        split_k=split_k, cluster_m=cluster_m, cluster_n=cluster_n,
    )  # fmt: skip


# (op, K, N): tunings for M up to 64, up to 128, and above. A residual's are its matmul's.
_TABLE = {
    ("matmul", 4096, 6144): (
        _t(64, 64, 128, 6),
        _t(64, 96, 128, 5, 1, 2),
        _t(128, 192, 64, 4, 1, 2),
    ),
    ("gate_up", 4096, 24576): (
        _t(64, 192, 64, 6),
        _t(128, 192, 64, 5),
        _t(128, 256, 64, 4, 1, 2),
    ),
}


def tuning_for(op: str, M: int, K: int, N: int) -> Tuning:
    """The tuning of a shape: the table's, else by rule. ValueError: the kernel cannot serve it."""
    family = "matmul" if op == "residual" else op
    known = _TABLE.get((family, K, N))
    tuning = known[(M > 64) + (M > 128)] if known else _by_rule(op, M, K, N)
    tuning = _with_full_clusters(tuning, M)
    if op == "residual" and tuning.split_k == 1:  # whose tile also takes shared memory
        room = SHARED_MEMORY - 2 * tuning.block_m * tuning.block_n
        fit = room // (tuning.ring_bytes // tuning.stages)
        tuning = dataclasses.replace(tuning, stages=min(tuning.stages, fit))
    make_plan(op, M, K, N, tuning)
    return tuning


def _with_full_clusters(tuning: Tuning, M: int) -> Tuning:
    """Clusters that M's row tiles fill; how they are grouped changes no result's bits."""
    row_tiles = math.ceil(M / tuning.block_m)
    return dataclasses.replace(tuning, cluster_m=math.gcd(tuning.cluster_m, row_tiles))


def _by_rule(op: str, M: int, K: int, N: int) -> Tuning:
    """The widest column tile among those that leave the fewest SMs idle, and a ring that fits."""
    block_m = 64 if M <= 64 else 128
    row_tiles = math.ceil(M / block_m)
    halves = 2 if op == "gate_up" else 1
    widths = [n for n in (256, 192, 160, 128, 96, 64, 32) if op in HEADS or N % n == 0]
    if not widths or K % 64:
        raise ValueError(f"mosaic_gpu {op}: no tile divides [{M}, {K}] by {N} columns")

    def busy(block_n):
        tiles = math.ceil(N / block_n) * row_tiles
        return tiles / SMS / math.ceil(tiles / SMS)

    best = max(map(busy, widths))
    block_n = next(n for n in widths if busy(n) >= 0.95 * best)
    result = block_m * block_n // halves * _RESULT_BYTES.get(op, 2)
    stages = min(16, (SHARED_MEMORY - result) // ((block_m + block_n) * 128))
    return _t(block_m, block_n, 64, stages)


# (op, K, N): what beat XLA on an H200 (jax 0.11.2), for rows in the range. Whole DFlash steps at
# Qwen3-8B shapes, ms: 7.40 -> 7.07 at 128 rows, 17.9 -> 17.6 at 512 by the fused gate_up and
# the head; alone, µs: qkv 20.4 -> 17.8, out 14.2 -> 12.5, head 370 -> 330 and 1044 -> 967, all
# with these tunings (benchmarks/h200-kernels.json has the kernel with `tuning_for`'s).
_QKV_128, _OUT_128, _HEAD_128 = (
    _t(128, 64, 64, 8, 1, 1, 4),
    _t(64, 64, 128, 6, 1, 2, 1),
    _t(128, 192, 64, 5),
)
_HEAD_512, _GATE_UP_512 = _t(128, 256, 64, 4, 1, 2, 1), _t(128, 256, 64, 4)
WINS: dict[tuple[str, int, int], tuple[tuple[range, Tuning], ...]] = {
    ("matmul", 4096, 6144): ((range(65, 129), _QKV_128),),
    ("matmul", 4096, 4096): ((range(65, 129), _OUT_128),),
    ("gate_up", 4096, 24576): ((range(257, 513), _GATE_UP_512),),
    ("head_argmax", 4096, 151936): ((range(65, 129), _HEAD_128), (range(257, 513), _HEAD_512)),
}


def winner(op: str, M: int, K: int, N: int) -> Tuning | None:
    """The kernel's tuning where it beats XLA; None where XLA is as fast or nothing was measured."""
    for rows, tuning in WINS.get((op, K, N), ()):
        if M in rows:
            return _with_full_clusters(tuning, M)
    return None


# (K, N): into how many pieces K is cut for up to 64 rows, where the consumer adds them up. XLA cuts
# [16, 4096] by [4096, 6144] in 4 itself, and needs a kernel to add them: without it a DFlash step
# of Qwen3-8B's shapes takes 5.51 ms in place of 5.56 (H200, jax 0.11.2). For the output and down
# projections a kernel that added pieces and residual and took the norm lost: 4.2 µs in 16 CTAs, and
# 5.63 ms a step, where XLA's two kernels take 3.6.
PIECES = {(4096, 6144): 4}


def pieces_of(M: int, K: int, N: int) -> int:
    """Pieces of a product whose consumer adds them up; 1 where one GEMM is as good."""
    return PIECES.get((K, N), 1) if M <= 64 else 1


# Tiles of the canonical form by rows, the largest first: what won in chains of a layer's products
# of Qwen3-8B's shapes on an H200 (jax 0.11.2, 2026-11-22).
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


def canonical_tuning(op: str, M: int, K: int, N: int, pieces: int) -> Tuning:
    """The largest tile whose CTAs fill the GPU, of those that sum K in so many pieces.

    Up to 256 rows pieces go to CTAs of their own, whose sums are written and read again; from there
    on a CTA walks them. ValueError: the kernel cannot serve the shape.
    """
    by_rows = _CANONICAL["matmul" if op == "residual" else op]
    tiles = next(tiles for most, tiles in by_rows.items() if most >= M)
    walk = pieces if M > 256 else 1
    found = None
    for block_m, block_n in tiles:
        tuning = _with_ring(op, block_m, block_n, walk, pieces // walk)
        if tuning is None:
            continue
        try:
            plan = make_plan(op if pieces == walk else "matmul", M, K, N, tuning)
        except ValueError:
            continue
        found = tuning
        if plan.columns * plan.row_groups >= _FULL:
            return tuning
    if found is None:
        raise ValueError(f"canonical {op}: no tile divides [{M}, {K}] by {N} columns")
    return found


_RESULT_BYTES = {"head_argmax": 0, "head_logits": 4}


def _with_ring(op: str, block_m: int, block_n: int, walk: int, split: int) -> Tuning | None:
    """A tile with as many stages as fit beside what its result takes; None if that is no ring."""
    half = block_m * block_n // (2 if op == "gate_up" else 1)
    taken = half * (4 if split > 1 else _RESULT_BYTES.get(op, 2))
    taken += 4 * block_m * block_n if walk > 1 else 0
    stages = min(10, (SHARED_MEMORY - taken) // ((block_m + block_n) * 128))
    if stages < 3:
        return None
    return dataclasses.replace(_t(block_m, block_n, 64, stages, split), walk=walk)
