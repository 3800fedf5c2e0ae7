"""The ring of tiles of the Mosaic GPU products: which tiles a CTA has, and who loads them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.tuning import Plan


class Ring(NamedTuple):
    """The ring of tiles between producer and consumers."""

    x: Any  # [stages, block_m, block_k]
    w: Any  # [stages, halves, block_k, half_n], for the head [stages, 1, block_n, block_k]
    full: Any
    empty: Any


class Tiles:
    """This CTA's column tiles, numbered from 0: where tile i lies."""

    def __init__(self, plan: Plan):
        self.plan = plan
        cluster = lax.axis_index("cluster")
        self.first = lax.div(cluster, plan.row_groups)
        row_tile = lax.rem(cluster, plan.row_groups) * plan.tuning.cluster_m + lax.axis_index("m")
        self.row = row_tile * plan.tuning.block_m
        self.count = lax.div(plan.columns - self.first + plan.clusters - 1, plan.clusters)

    def at(self, i):
        """(split over K, first column of the tile, of one half for gate_up)."""
        t = self.plan.tuning
        column = self.first + i * self.plan.clusters
        per_split = self.plan.columns // t.split_k
        tile = lax.rem(column, per_split) * t.cluster_n + lax.axis_index("n")
        return lax.div(column, per_split), tile * self.plan.half_n


def load_rows(x_gmem, step, rows, k, slot, full, across):
    """Begins to copy these rows and columns of x; `full` tells when they are there."""
    del step  # of its tile
    plgpu.copy_gmem_to_smem(x_gmem.at[rows, k], slot, full, collective_axes=across)


def produce(plan: Plan, tiles: Tiles, ring: Ring, firsts, load_x, w_gmem, ahead: int = 0):
    """Fills the ring for all tiles: by `load_x`, as `load_rows`, and with the columns of w from
    `firsts` on. The weights of the first `ahead` slots are asked for before any rows, for rows that
    come late. Rows that are there are asked for with their slot's weights, see `fill`."""
    t = plan.tuning
    tile_steps = t.walk * plan.k_steps
    steps = tiles.count * tile_steps

    def place(step):
        split, column = tiles.at(lax.div(step, tile_steps))
        k = (split * tile_steps + lax.rem(step, tile_steps)) * t.block_k
        return lax.rem(step, t.stages), pl.ds(k, t.block_k), column

    def load_w(step):
        slot, k, column = place(step)
        for half, first in enumerate(firsts):
            n = pl.ds(column + first, plan.half_n)
            plgpu.copy_gmem_to_smem(
                w_gmem.at[n, k] if plan.k_minor else w_gmem.at[k, n],
                ring.w.at[slot, half], ring.full.at[slot],
                collective_axes=("m",) if t.cluster_m > 1 else None,
            )  # fmt: skip

    pl.loop(0, jnp.minimum(steps, ahead))(load_w)

    @pl.loop(0, steps)
    def _load(step):
        slot, k, _column = place(step)
        pl.when(step >= t.stages)(lambda: plgpu.barrier_wait(ring.empty.at[slot]))
        pl.when(step >= ahead)(lambda: load_w(step))

        load_x(
            lax.rem(step, tile_steps), pl.ds(tiles.row, t.block_m), k, ring.x.at[slot],
            ring.full.at[slot], ("n",) if t.cluster_n > 1 else None,
        )  # fmt: skip

    # A CTA may not end while others can still arrive at its barriers.
    @pl.loop(jnp.maximum(steps - t.stages, 0), steps)
    def _drain(step):
        plgpu.barrier_wait(ring.empty.at[lax.rem(step, t.stages)])


def fill(load: Callable[..., None], steps: int, empty: Any, slots: int) -> None:
    """Fills a ring of `slots` with what `load(step)` begins to copy, a slot's weights and rows one
    after the other, so that the first slot is soon whole. With the weights of the whole ring first
    a step of Qwen3-8B's pair in INT4 took 3.70 ms in place of 3.61, and 3.63 in place of 3.61 in
    another hold (an H200, jax 0.11.2, 2026-11-27)."""
    pl.loop(0, slots)(load)

    @pl.loop(slots, steps)
    def _(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, slots)])
        load(step)

    @pl.loop(steps - slots, steps)  # a CTA may not end before all have arrived
    def _(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, slots)])


def empty_barrier(plan: Plan):
    """A slot is free once every CTA that the slot's loads are multicast to has consumed it."""
    t = plan.tuning
    if t.cluster_m * t.cluster_n == 1:
        return plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=t.stages)
    return plgpu.ClusterBarrier(
        collective_axes=("m", "n"), num_arrivals=plan.consumers, num_barriers=t.stages
    )
