"""The Mosaic kernels of block attention: one that leaves the result, and one that leaves chunks'.

Their CTAs' walks are in `mosaic_walk`, and how they are cut in `mosaic_task`; see `mosaic_gpu`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_attention.combine import LOG2E
from pallas_kernels.block_attention.mosaic_layouts import ROW_LAYOUT, across
from pallas_kernels.block_attention.mosaic_left import Left, leave, left_types
from pallas_kernels.block_attention.mosaic_shares import AXIS
from pallas_kernels.block_attention.mosaic_tails import has_tail, take
from pallas_kernels.block_attention.mosaic_task import ROWS, Task
from pallas_kernels.block_attention.mosaic_walk import Memory, memory_of, scratch, walk
from pallas_kernels.block_attention.pieces import LOWEST, finish


def one_chunk(task: Task, interpret, sinks: bool):
    """The kernel for a cache of one chunk, or that walks all: writes the result itself, but for
    texts with tails."""

    strands, shares = task.tiles.strands, task.tiles.shares
    each = task.columns // shares
    # First of each text that has a tail, then of pieces of tails.
    apart = left_types(task, task.B + task.tails) if task.tails else ()

    def block_attention(q_ref, k_ref, v_ref, lengths_ref, widths_ref, *rest):
        table_ref, rest = _split(task, rest)
        sinks_ref, rest = (rest[:1], rest[1:]) if sinks else ((), rest)
        plan_ref, rest = (rest[0], rest[1:]) if task.tails else (None, rest)
        out_ref, *rest = rest
        left, rest = (Left(*rest[:3]), rest[3:]) if task.tails else (None, rest)
        out_s, *refs = rest
        memory, at = memory_of(task, refs), _place()
        b, _, head, tile, part = at
        first = part * task.columns + (lax.axis_index(AXIS) * each if shares > 1 else 0)
        length, width = lengths_ref[b], widths_ref[b]

        def go(strand: int):
            all_refs = q_ref, k_ref, v_ref, table_ref
            most = None if plan_ref is None else plan_ref[0]
            piece = walk(task, *all_refs, length, width, at, memory, strand, most)
            if strand:
                return
            if left is None:
                write(piece)
                return
            long, columns = has_tail(plan_ref, b), pl.ds(first, each)
            pl.when(jnp.logical_not(long))(partial(write, piece))
            pl.when(long)(partial(leave, left, (b, head, tile), columns, piece))

            def sums_of(b, chunk):
                numbers = lengths_ref[b], widths_ref[b], (b, chunk, head, tile, part)
                return walk(task.of_one_chunk, *all_refs, *numbers, memory)

            take(task, plan_ref, left, at, sums_of)

        def write(piece):
            sink = _sink_rows(task, sinks_ref[0], head) if sinks_ref else None
            out_s[...] = finish(piece, sink, across).astype(jnp.bfloat16)
            plgpu.commit_smem()
            heads = pl.ds(head * task.G, task.G)
            columns = pl.ds(first, each)
            for i in range(task.queries):
                query = tile * task.queries + i
                written = out_s.at[pl.ds(i * task.G, task.G)]
                target = out_ref.at[b, query, heads, columns]
                copy = partial(plgpu.copy_smem_to_gmem, written, target)
                # The last tile may have fewer queries.
                copy() if task.T % task.queries == 0 else pl.when(query < task.T)(copy)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if strands == 1:
            go(0)
            return
        for strand in range(strands):
            pl.when(lax.axis_index("strand") == strand)(partial(go, strand))

    return plgpu.kernel(
        block_attention,
        out_type=[out_type(task), *apart] if apart else out_type(task),
        scratch_types=[plgpu.SMEM((ROWS, each), jnp.bfloat16), *scratch(task)],
        **task.grid,
        **({"num_threads": strands, "thread_name": "strand"} if strands > 1 else {}),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def each_chunk(task: Task, interpret):
    """The kernel of one chunk a CTA: unscaled sums, the maximum of each row and its weights' sum.

    What lies past the sequence or before its window is not written.
    """

    def block_attention_chunk(q_ref, k_ref, v_ref, lengths_ref, widths_ref, *rest):
        table_ref, rest = _split(task, rest)
        left, memory, at = Left(*rest[:3]), Memory(*rest[3:]), _place()
        b, turn, _, tile, part = at
        length, width, size = lengths_ref[b], widths_ref[b], task.tiles.chunk
        first, last = task.read_by_tile(length, width, tile)

        @pl.loop(lax.div(first, size) + turn, pl.cdiv(last, size), step=task.turns)
        def write(chunk):
            refs = q_ref, k_ref, v_ref, table_ref
            here = b, chunk, *at[2:]
            piece = walk(task, *refs, length, width, here, memory)
            leave(left, here[:4], pl.ds(part * task.columns, task.columns), piece)

    return plgpu.kernel(
        block_attention_chunk,
        out_type=list(left_types(task, task.B, task.chunks)),
        scratch_types=scratch(task),
        **task.grid,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _split(task: Task, rest):
    """The table's ref, if there is one, and the refs after it."""
    return (rest[0], rest[1:]) if task.paged else (None, rest)


def _place():
    """Indices of this CTA."""
    return tuple(lax.axis_index(name) for name in ("batch", "turn", "head", "tile", "part"))


def _sink_rows(task: Task, sinks_ref, head):
    """The sink of every row's query head, in units of log 2: [ROWS]."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
    sink = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
    for g in range(task.G):
        sink = jnp.where(lax.rem(row, task.G) == g, sinks_ref[head * task.G + g] * LOG2E, sink)
    return sink


def out_type(task: Task):
    return jax.ShapeDtypeStruct((task.B, task.T, task.K * task.G, task.H), jnp.bfloat16)
