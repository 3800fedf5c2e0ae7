"""Products of experts' codes, on Hopper: each tile of rows by its expert, as dense codes are.

`matmul.kept.mosaic` says how codes become sums, and in which order. Here CTAs stay: each takes
every G-th pair of a tile of rows and a tile of columns, so those that a routing leaves over cost
nothing, and the ring runs on from one pair to the next.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.used import Used
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.kept import mosaic as kept_mosaic
from pallas_kernels.matmul.kept.fragments import COLUMNS, DEPTH, ROW, Fragments
from pallas_kernels.matmul.mosaic_kernel import silu_times, tiled
from pallas_kernels.matmul.tuning import SMS

CTAS = 2  # of a multiprocessor
SHARED_MEMORY = 110_000  # bytes of a CTA, less barriers
STAGES = 8


def product(
    x: Float[Array, "M K"] | Float[Array, "TR K"],
    w: Fragments,
    used: Used,
    T: int,
    rows: int,
    halves: Firsts | None = None,
) -> Float[Array, "TR N"]:
    """Every used tile's rows times its expert's w, or silu of one half times the other.

    Each of T tiles has `rows` rows, a multiple of 8: its own of x, or else all of x, which are as
    many or fewer than 8.
    What no used tile has holds anything.
    """
    (_, K, N), halved = w.shape, 2 if halves else 1
    columns, shared = N // halved, len(x) != T * rows
    deep = 2 if halved == 1 and K % (2 * DEPTH) == 0 else 1
    depth, word_rows = DEPTH * deep, w.words.shape[-2]
    assert columns % COLUMNS == 0 and K % DEPTH == 0 and rows % 8 == 0, (w.shape, rows)
    assert not shared or len(x) in (rows, *range(1, 8)), (x.shape, rows)
    slot = halved * deep * word_rows * ROW * 4 + rows * depth * 2
    stages = min(STAGES // halved // deep, (SHARED_MEMORY - rows * COLUMNS * 2) // slot, K // depth)
    assert stages, (w.shape, rows)
    ctas = min(CTAS * SMS, len(used.expert) * columns // COLUMNS)
    launch = plgpu.kernel(
        functools.partial(
            _kernel, w=jax.tree.map(lambda a: None, w), steps=K // depth, stages=stages, deep=deep,
            firsts=tuple(first // COLUMNS for first in halves or (0,)), shared=shared, ctas=ctas,
        ),
        out_type=jax.ShapeDtypeStruct((T * rows, columns), x.dtype),
        scratch_types={
            "ring": plgpu.SMEM((stages, halved, deep, word_rows, ROW), jnp.uint32),
            "x_ring": plgpu.SMEM((stages, rows, depth), x.dtype, transforms=tiled(128, 2)),
            "out_smem": plgpu.SMEM((rows, COLUMNS), x.dtype),
            "full": plgpu.Barrier(num_arrivals=1 + halved, num_barriers=stages),
            "empty": plgpu.Barrier(num_barriers=stages),
        },
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        kernel_name="kept_experts_gate_up" if halves else "kept_experts",
    )  # fmt: skip
    words = w.words.reshape(-1, *w.words.shape[2:])
    return launch(x, words, *used)


def _kernel(
    x_gmem, w_gmem, expert_gmem, tile_gmem, count_gmem, out_gmem,
    *, ring, x_ring, out_smem, full, empty,
    w: Fragments, steps: int, stages: int, deep: int, firsts: tuple[int, ...], shared: bool,
    ctas: int,
):  # fmt: skip
    wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
    rows, columns = x_ring.shape[1], out_gmem.shape[1] // COLUMNS
    pairs = lax.div(count_gmem[0] * columns - cta + ctas - 1, ctas)  # of this CTA

    def place(pair):
        """A pair's entry of the list, and its tile of columns."""
        at = cta + pair * ctas
        return lax.div(at, columns), lax.rem(at, columns)

    @pl.when(wg == 1)
    def _():
        def load(slot, k, column, row):
            for part, first in enumerate(firsts):
                plgpu.copy_gmem_to_smem(
                    w_gmem.at[first + column, pl.ds(k, deep)], ring.at[slot, part], full.at[slot]
                )
            plgpu.copy_gmem_to_smem(
                x_gmem.at[pl.ds(row, rows), pl.ds(k * DEPTH, DEPTH * deep)],
                x_ring.at[slot], full.at[slot],
            )  # fmt: skip

        @pl.loop(0, pairs)
        def _(pair):
            entry, column = place(pair)
            column = expert_gmem[entry] * columns * len(firsts) + column
            row = 0 if shared else tile_gmem[entry] * rows

            @pl.loop(0, steps)
            def _(step):
                turn = pair * steps + step
                slot = lax.rem(turn, stages)
                pl.when(turn >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                load(slot, step * deep, column, row)

        @pl.loop(lax.max(pairs * steps - stages, 0), pairs * steps)
        def _(turn):  # a CTA may not end before all have arrived
            plgpu.barrier_wait(empty.at[lax.rem(turn, stages)])

    @pl.when(wg == 0)
    def _():
        @pl.loop(0, pairs)
        def _(pair):
            entry, column = place(pair)

            def sums(*accs):
                return kept_mosaic.sums(
                    accs, ring, x_ring, full, empty, w=w, begin=pair * steps, steps=steps,
                    stages=stages, deep=deep,
                )  # fmt: skip

            accs = [plgpu.WGMMAAccumulatorRef((COLUMNS, rows)) for _ in firsts]
            values = pl.run_scoped(sums, *accs)
            value = values[0]
            if len(values) == 2:
                value = silu_times(value, values[1], out_smem.dtype)
            kept_mosaic.store(out_smem, value.astype(out_smem.dtype))
            plgpu.commit_smem()
            target = pl.ds(tile_gmem[entry] * rows, rows), pl.ds(column * COLUMNS, COLUMNS)
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[target])
            plgpu.wait_smem_to_gmem(0)
