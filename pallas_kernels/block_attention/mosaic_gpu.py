"""Block attention on Hopper: TMA loads, wgmma, the KV axis split at absolute positions.

A CTA of the first kernel takes one sequence, one KV head, one chunk of cache slots and up to 64
query rows (the G query heads of one KV head, times queries; fewer are padded). It walks its chunk
in blocks of slots with an online softmax and leaves (acc, max, sum); a second kernel combines the
chunks. A cache of one chunk needs no second kernel.

A row's bits depend on what the row sees and on nothing else. Chunks and blocks begin at fixed
slots, whatever the length. A slot that a row cannot see gets weight 0 and never moves the row's
maximum. A chunk or block that no row of the CTA sees is skipped, and one that only other rows see
adds exactly 0. Chunks are combined in ascending order, without atomics.

It takes only bfloat16, because wgmma would round float32 to tf32. It knows no device: see __init__.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention.combine import LOG2E, combine, combine_in_order
from pallas_kernels.block_attention.mosaic_layouts import ROW_LAYOUT, SWIZZLED_ROWS, across
from pallas_kernels.block_attention.mosaic_shares import AXIS
from pallas_kernels.block_attention.mosaic_task import ROWS, STAGES, Task, Tiles, choose_tiles
from pallas_kernels.block_attention.mosaic_walk import Memory, memory_of, scratch, walk
from pallas_kernels.block_attention.pieces import LOWEST, finish

MAX_GROUPS = 32  # query heads of a KV head: a row tile holds two queries of so many
SHARED_BYTES = 227 * 1024  # what one CTA may have on sm90
SHARED_ALIGNMENT = 128  # bytes, of what TMA takes there


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
    interpret: Any = False,
    tiles: Tiles | None = None,
    table: Int[Array, "B _"] | None = None,
) -> Float[Array, "B T N H"]:
    """The contract of `pallas_kernels.block_attention`; S must be a multiple of 64.

    `interpret` is True, or InterpretGPUParams, to run on a CPU. `tiles` is for measurements.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if table is not None:
        S *= table.shape[1]
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        raise ValueError(
            f"block attention's mosaic_gpu backend takes bfloat16, not q {q.dtype}, k {k.dtype}, "
            f"v {v.dtype}: use 'triton' or 'xla'"
        )
    if H not in STAGES or N % K or N // K > MAX_GROUPS or not 1 <= T <= 2048:
        raise ValueError(
            "block attention's mosaic_gpu backend takes T 1 to 2048, N / K 1 to "
            f"{MAX_GROUPS} and H {', '.join(map(str, STAGES))}, not {T=} {N=} {K=} {H=}: use 'xla'"
        )
    tiles = tiles or choose_tiles(B, S, K, H)
    if S % tiles.block:
        raise ValueError(f"a cache of {S} slots: the capacity must be a multiple of {tiles.block}")
    if table is not None and tiles.block != k.shape[1]:
        raise ValueError(f"pages of {k.shape[1]} positions: blocks of {tiles.block} read no table")
    if tiles.shared_bytes(H) > SHARED_BYTES:
        raise ValueError(f"{tiles} does not fit a multiprocessor at {H=}")
    each = 2 * N // K * (min(H, 128) // tiles.shares)
    if tiles.shares > 1 and each % SHARED_ALIGNMENT:
        raise ValueError(f"{tiles} would write {each} bytes a query: not a multiple of 128")
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    task = Task(
        B=B, T=T, S=S, K=K, G=N // K, H=H, tiles=tiles,
        causal=causal, scale=float(scale), window=window, softcap=softcap, ring=ring,
        paged=table is not None,
    )  # fmt: skip
    return _attend(q, k, v, lengths, widths, sinks, task, interpret or None, table)


# One jit for all call sites: a model of 36 layers compiles the kernels once.
@partial(jax.jit, static_argnames=("task", "interpret"))
def _attend(q, k, v, lengths, widths, sinks, task: Task, interpret, table=None):
    B, T, K, G, H = task.B, task.T, task.K, task.G, task.H
    n, queries = task.row_tiles, task.queries
    # XLA fuses this into the operation that makes q.
    rows = jnp.pad(q, ((0, 0), (0, n * queries - T), (0, 0), (0, 0)))
    rows = rows.reshape(B, n, queries, K, G, H).transpose(0, 3, 1, 2, 4, 5)
    rows = rows.reshape(B, K, n, queries * G, H)
    if queries * G > SWIZZLED_ROWS:  # TMA takes whole tiles, or one that is not full
        rows = jnp.pad(rows, ((0, 0),) * 3 + ((0, -queries * G % SWIZZLED_ROWS), (0, 0)))
    return _attend_rows(rows, k, v, lengths, widths, sinks, task, interpret, table)


def _attend_rows(rows, k, v, lengths, widths, sinks, task: Task, interpret, table=None):
    lengths, widths = lengths.astype(jnp.int32), widths.astype(jnp.int32)
    tables = () if table is None else (table.astype(jnp.int32),)
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    if task.chunks == 1:
        return _one_chunk(task, interpret, bool(extra))(
            rows, k, v, lengths, widths, *tables, *extra
        )
    accs, tops, totals = _each_chunk(task, interpret)(rows, k, v, lengths, widths, *tables)
    add = combine_in_order if task.tiles.ordered else combine
    return add(
        accs, tops, totals, lengths, widths, sinks, _out_type(task),
        chunk=task.tiles.chunk, queries=task.queries, seen=task.read_by_tile,
        interpret=interpret is not None,
    )  # fmt: skip


def _one_chunk(task: Task, interpret, sinks: bool):
    """The kernel for a cache of one chunk: writes the result itself."""

    strands, shares = task.tiles.strands, task.tiles.shares
    each = task.columns // shares

    def block_attention(q_ref, k_ref, v_ref, lengths_ref, widths_ref, *rest):
        table_ref, rest = _split(task, rest)
        sinks_ref, rest = (rest[:1], rest[1:]) if sinks else ((), rest)
        out_ref, out_s, *refs = rest
        memory, at = memory_of(task, refs), _place()
        b, _, head, tile, part = at
        first = part * task.columns + (lax.axis_index(AXIS) * each if shares > 1 else 0)
        length, width = lengths_ref[b], widths_ref[b]

        def go(strand: int):
            all_refs = q_ref, k_ref, v_ref, table_ref
            acc, top, total = walk(task, *all_refs, length, width, at, memory, strand)
            if strand:
                return
            sink = _sink_rows(task, sinks_ref[0], head) if sinks_ref else None
            out_s[...] = finish((acc, top, total), sink, across).astype(jnp.bfloat16)
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
        out_type=_out_type(task),
        scratch_types=[plgpu.SMEM((ROWS, each), jnp.bfloat16), *scratch(task)],
        **task.grid,
        **({"num_threads": strands, "thread_name": "strand"} if strands > 1 else {}),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _each_chunk(task: Task, interpret):
    """The kernel of one chunk a CTA: unscaled sums, the maximum of each row and its weights' sum.

    What lies past the sequence or before its window is not written.
    """
    shape = (task.B, task.chunks, task.K, task.row_tiles, ROWS)
    row = jax.ShapeDtypeStruct(shape, jnp.float32)

    def block_attention_chunk(q_ref, k_ref, v_ref, lengths_ref, widths_ref, *rest):
        table_ref, (acc_ref, top_ref, total_ref, *memory) = _split(task, rest)
        at = _place()
        b, turn, _, tile, part = at
        length, width, size = lengths_ref[b], widths_ref[b], task.tiles.chunk
        first, last = task.read_by_tile(length, width, tile)

        @pl.loop(lax.div(first, size) + turn, pl.cdiv(last, size), step=task.turns)
        def write(chunk):
            refs = q_ref, k_ref, v_ref, table_ref
            here = b, chunk, *at[2:]
            acc, top, total = walk(task, *refs, length, width, here, Memory(*memory))
            acc_ref[(*here[:4], slice(None), pl.ds(part * task.columns, task.columns))] = acc

            @pl.when(part == 0)
            def write_rows():
                top_ref[here[:4]] = top
                total_ref[here[:4]] = total

    return plgpu.kernel(
        block_attention_chunk,
        out_type=[jax.ShapeDtypeStruct((*shape, task.H), jnp.float32), row, row],
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


def _out_type(task: Task):
    return jax.ShapeDtypeStruct((task.B, task.T, task.K * task.G, task.H), jnp.bfloat16)
