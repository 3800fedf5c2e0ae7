"""How an MLP that is one kernel is cut: the tiles of its products, and their shared memory."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.gather.blocks import BLOCK, MOST, Cut
from pallas_kernels.matmul.tuning import (
    SHARED_MEMORY,
    WALKED,
    WARPGROUP_ROWS,
    Plan,
    Tuning,
    make_plan,
)

WIDTHS = (256, 192, 128, 64)  # columns of a tile; with more rows it would have two consumers
# Bytes of a row of a tile on its way from a CTA. With whole rows of down's pieces the ring had 3
# slots: 512 rows of Qwen3-8B's MLP over two H200s took 168 µs, by two products and a gather 174;
# so they took 156, and 167, in another hold, when tiles were still written at once.
PART = 512
MOST_RING = 10  # slots
# Columns that a CTA makes at least: with fewer there is too little beside which what they push can
# pass. 512 rows over four H200s, 2 tiles of 192: a step took 9.14 ms, and 8.97 with two products
# (benchmarks/h200-x4-norms.json); 320 rows over two, 2 tiles of 256: an MLP takes 115 µs, and 143.
LEAST_COLUMNS = 512
# A tile takes as long as its columns and some more: 512 rows by 128 columns in 6 turns took 23 µs
# more than by 256 in 3, of some 75 (the same MLP, gate and up in a kernel of their own).
MORE = 130


class Plans(NamedTuple):
    """Of gate and up, and of down. All CTAs must run at once."""

    gate_up: Plan
    down: Plan

    @property
    def ctas(self) -> int:
        return max(plan.row_groups * plan.clusters for plan in self)

    @property
    def cut(self) -> Cut:
        """How gate and up's columns are made, for those who read them."""
        plan = self.gate_up
        left = (plan.columns - i * plan.clusters for i in range(turns(plan)))
        return Cut(
            rows=plan.M,
            columns=plan.N // plan.halves,
            width=plan.clusters * plan.half_n,
            waves=tuple(plan.row_groups * min(plan.clusters, count) for count in left),
        )


def plans(
    rows: int, gate_up: tuple[int, int], down: tuple[int, int], pieces: int, cores: int
) -> Plans | None:
    """For one device's parts of both weights, of these shapes, on so many multiprocessors; None if
    they are not for this way: fewer rows have better tiles by themselves."""
    (D, FF), (F, N) = gate_up, down
    if rows <= WALKED or rows % WARPGROUP_ROWS or rows * F > MOST or FF // 2 % BLOCK:
        return None
    if rows // WARPGROUP_ROWS > cores:
        return None
    made = _plan("gate_up", rows, D, FF, 1, cores, 0)
    if made and turns(made) * made.tuning.block_n < LEAST_COLUMNS:
        return None
    read = _plan("matmul", rows, F, N, pieces, cores, held(made)) if made else None
    return Plans(made, read) if made and read else None


def _plan(op: str, M: int, K: int, N: int, pieces: int, cores: int, taken: int) -> Plan | None:
    """The tile of 64 rows whose CTAs take the least in turn, beside `taken` bytes of shared memory;
    None if no tile divides the shape. No more CTAs than those turns need: all waves are as full."""

    def of(width: int) -> Plan | None:
        if N % width or K % (pieces * BLOCK):
            return None
        tuning = Tuning(
            block_m=WARPGROUP_ROWS, block_n=width, block_k=BLOCK, stages=1, split_k=pieces,
            sms=cores,
        )  # fmt: skip
        plan = make_plan(op, M, K, N, tuning)
        room = SHARED_MEMORY - taken - held(plan)
        stages = min(MOST_RING, room // tuning.ring_bytes)
        tuning = dataclasses.replace(tuning, stages=stages)
        return plan._replace(tuning=tuning, clusters=-(-plan.columns // turns(plan)))

    found = [plan for plan in map(of, WIDTHS) if plan]
    return min(found, key=lambda plan: turns(plan) * (plan.tuning.block_n + MORE), default=None)


def turns(plan: Plan) -> int:
    """Tiles of a CTA, at most."""
    return -(-plan.columns // plan.clusters)


def held(plan: Plan) -> int:
    """Bytes of shared memory of what is on its way from a CTA."""
    return plan.tuning.block_m * part(plan) * plan.out_bytes


def part(plan: Plan) -> int:
    """Columns of a tile that are on their way at once."""
    return min(plan.half_n, PART // plan.out_bytes)
