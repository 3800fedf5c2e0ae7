"""What a CTA of the Mosaic GPU products does: a producer of tiles, and consumers that sum them.

`mosaic_gpu` launches it and says what it promises; a plan is all that this file knows of a shape.
The producer is in `mosaic_ring`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_ring import Ring, Tiles, empty_barrier, load_rows, produce
from pallas_kernels.matmul.tuning import ARGMAX, WARPGROUP_ROWS, Plan

PRODUCER_REGISTERS = 40
WGMMA = plgpu.Layout.WGMMA
SWIZZLED_ROWS = 8  # of a tile of shared memory's layout, see `tiled`


def add_residual(out, residual):
    rounded = out.astype(residual.dtype).astype(jnp.float32)
    return (residual.astype(jnp.float32) + rounded).astype(residual.dtype)


def silu_times(gate, up, dtype):
    gate, up = (v.astype(dtype).astype(jnp.float32) for v in (gate, up))
    return (gate / (1 + jnp.exp(-gate)) * up).astype(dtype)


def scratch(plan: Plan) -> dict[str, Any]:
    t = plan.tuning
    tile = tiled(plan.swizzle, 2)
    w_tile = (t.block_n, t.block_k) if plan.k_minor else (t.block_k, plan.half_n)
    shared: dict[str, Any] = {
        "x_smem": plgpu.SMEM((t.stages, t.block_m, t.block_k), jnp.bfloat16, transforms=tile),
        "w_smem": plgpu.SMEM((t.stages, plan.halves, *w_tile), jnp.bfloat16, transforms=tile),
        "full": plgpu.Barrier(num_arrivals=1 + plan.halves, num_barriers=t.stages),
        "empty": empty_barrier(plan),
    }
    if plan.op in ARGMAX:
        return shared
    item = plan.out_bytes
    out = plgpu.SMEM(
        (plan.consumers, WARPGROUP_ROWS, plan.half_n), out_dtype(plan),
        transforms=tiled(out_swizzle(plan), item),
    )  # fmt: skip
    shared["out_smem"] = out
    if plan.op == "residual":
        shared["r_full"] = plgpu.Barrier(num_barriers=plan.consumers)
    return shared


def out_swizzle(plan: Plan) -> int:
    """Bytes of a row of the result's tiles that lie side by side in shared memory."""
    return plgpu.find_swizzle(math.gcd(plan.half_n, plan.N) * plan.out_bytes * 8)


def out_dtype(plan: Plan):
    return jnp.float32 if plan.out_bytes == 4 else jnp.bfloat16


def tiled(swizzle: int, item: int):
    tiling = plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // item))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def kernel(*refs, plan: Plan, firsts, x_smem, w_smem, full, empty, **epilogue_refs):
    inputs, outputs = (refs[:3], refs[3:]) if plan.op == "residual" else (refs[:2], refs[2:])
    wg = lax.axis_index("wg")
    ring = Ring(x_smem, w_smem, full, empty)
    tiles = Tiles(plan)
    consumer_registers = (512 - PRODUCER_REGISTERS) // plan.consumers // 8 * 8

    @pl.when(wg == plan.consumers)
    def _():
        if plan.consumers > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(plan, tiles, ring, firsts, functools.partial(load_rows, inputs[0]), inputs[1])

    @pl.when(wg < plan.consumers)
    def _():
        if plan.consumers > 1:
            plgpu.set_max_registers(min(consumer_registers, 240), action="increase")
        if plan.op in ARGMAX:
            consume_best(tiles, functools.partial(_logits, plan, tiles, ring), *outputs)
        else:
            result = Result(plan, *outputs)
            consume_tiles(plan, tiles, ring, result, inputs[2:], **epilogue_refs)


def accumulate(plan: Plan, ring: Ring, piece, accs):
    """Adds all K steps of piece number `piece` to the accumulators and frees its slots."""
    stages = plan.tuning.stages
    rows = pl.ds(lax.axis_index("wg") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    first = piece * plan.k_steps

    @pl.loop(0, plan.k_steps)
    def _step(k):
        slot = lax.rem(first + k, stages)
        plgpu.barrier_wait(ring.full.at[slot])
        for half, acc in enumerate(accs):
            w = ring.w.at[slot, half]
            w = w.transpose((1, 0)) if plan.k_minor else w
            plgpu.wgmma(acc, ring.x.at[slot, rows], w)
        plgpu.wgmma_wait(plan.halves)  # the step before this one has been read

        @pl.when(k > 0)
        def _():
            plgpu.barrier_arrive(ring.empty.at[lax.rem(first + k - 1, stages)])

    values = [acc[...] for acc in accs]
    plgpu.barrier_arrive(ring.empty.at[lax.rem(first + plan.k_steps - 1, stages)])
    return values


def _sum_pieces(plan: Plan, ring: Ring, tile):
    """The sums of tile number `tile`: its pieces one by one, each added to those before it."""
    walk = plan.tuning.walk

    def piece(p):
        add = functools.partial(accumulate, plan, ring, tile * walk + p)
        return pl.run_scoped(lambda *accs: add(accs), *accumulators(plan))

    def with_piece(p, sums):
        return [before + more for before, more in zip(sums, piece(p), strict=True)]

    # A loop, lest all pieces be kept and added at the end, which spills.
    return lax.fori_loop(1, walk, with_piece, piece(0)) if walk > 1 else piece(0)


def accumulators(plan: Plan):
    return [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, plan.half_n)) for _ in range(plan.halves)]


class Result(NamedTuple):
    """Takes tiles to where the result lies."""

    plan: Plan
    gmem: Any

    def take(self, smem, tile, split, rows, columns) -> None:
        """Begins to copy a tile to its place by way of shared memory, which is free."""
        smem[...] = tile
        plgpu.commit_smem()
        target = self.gmem.at[split] if self.plan.split else self.gmem
        plgpu.copy_smem_to_gmem(smem, target.at[rows, columns])


def consume_tiles(
    plan: Plan, tiles: Tiles, ring: Ring, result: Any, residual=(),
    *, out_smem: Any, r_full: Any = None,
):  # fmt: skip
    """Sums this CTA's tiles, which `result` takes."""
    wg = lax.axis_index("wg")
    rows = pl.ds(tiles.row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @pl.loop(0, tiles.count)
    def _tile(i):
        split, column = tiles.at(i)
        columns = pl.ds(column, plan.half_n)
        if residual:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the residual lies where its sum will
            plgpu.copy_gmem_to_smem(residual[0].at[rows, columns], out_smem.at[wg], r_full.at[wg])
        values = _sum_pieces(plan, ring, i)
        if plan.op == "gate_up":
            out = silu_times(values[0], values[1], jnp.bfloat16)
        elif residual:
            plgpu.barrier_wait(r_full.at[wg])
            out = add_residual(values[0], plgpu.load(out_smem.at[wg], layout=WGMMA))
            plgpu.commit_smem()  # all have read it
        else:
            out = values[0].astype(out_dtype(plan))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left out_smem
        result.take(out_smem.at[wg], out, split, rows, columns)

    plgpu.wait_smem_to_gmem(0)


def _logits(plan: Plan, tiles: Tiles, ring: Ring, i):
    """Of tile number `i`, and their ids."""
    _, column = tiles.at(i)
    (logits,) = pl.run_scoped(lambda *accs: accumulate(plan, ring, i, accs), *accumulators(plan))
    ids = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=WGMMA) + column
    if plan.N % (plan.tuning.block_n * plan.tuning.cluster_n):  # ids past V came as zeros
        logits = jnp.where(ids < plan.N, logits, -jnp.inf)
    return logits, ids


def consume_best(tiles: Tiles, logits_of, best_gmem, index_gmem, *total_gmem):
    """Keeps each row's best value and its lowest id over this CTA's tiles, which ascend in id; with
    a third output the sum of exp(value - best) too. `logits_of` a tile's number gives its logits,
    and their ids."""
    plan, rows_layout = tiles.plan, WGMMA.reduce(1)
    per_row = (WARPGROUP_ROWS,)

    def tile(i, carry):
        best, index, total = carry
        logits, ids = logits_of(i)
        top = logits.max(axis=1)
        is_top = logits == lax.broadcast_in_dim(top, logits.shape, [0])
        lowest = jnp.where(is_top, ids, jnp.int32(2**31 - 1)).min(axis=1)
        better = top > best
        new_best = jnp.where(better, top, best)
        if total_gmem:
            weights = jnp.exp(logits - lax.broadcast_in_dim(new_best, logits.shape, [0]))
            total = total * jnp.exp(best - new_best) + weights.sum(axis=1)
        return new_best, jnp.where(better, lowest, index), total

    none = plgpu.layout_cast(jnp.full(per_row, -jnp.inf, jnp.float32), rows_layout)
    first = plgpu.layout_cast(jnp.zeros(per_row, jnp.int32), rows_layout)
    zero = plgpu.layout_cast(jnp.zeros(per_row, jnp.float32), rows_layout)
    best, index, total = lax.fori_loop(0, tiles.count, tile, (none, first, zero))
    rows = pl.ds(tiles.row + lax.axis_index("wg") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    cta = tiles.first * plan.tuning.cluster_n + lax.axis_index("n")
    best_gmem.at[cta][rows] = best
    index_gmem.at[cta][rows] = index
    for gmem in total_gmem:
        gmem.at[cta][rows] = total
