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
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import mosaic_tails
from pallas_kernels.block_attention.combine import combine, combine_in_order
from pallas_kernels.block_attention.combine_tails import combine_tails
from pallas_kernels.block_attention.mosaic_kernels import each_chunk, one_chunk, out_type
from pallas_kernels.block_attention.mosaic_layouts import SWIZZLED_ROWS
from pallas_kernels.block_attention.mosaic_task import STAGES, Task, Tiles, choose_tiles

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
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    extra = () if sinks is None else (sinks,)
    if task.chunks == 1:
        given = rows, k, v, lengths, widths, *tables, *extra
        if not task.tails:
            return one_chunk(task, interpret, bool(extra))(*given)
        tails = mosaic_tails.plan(task, lengths, widths)
        out, sums, scales, weights = one_chunk(task, interpret, bool(extra))(*given, tails)
        how = {"queries": task.queries, "interpret": interpret is not None}
        return combine_tails(out, sums, scales, weights, tails, sinks, **how)
    accs, tops, totals = each_chunk(task, interpret)(rows, k, v, lengths, widths, *tables)
    add = combine_in_order if task.tiles.ordered else combine
    return add(
        accs, tops, totals, lengths, widths, sinks, out_type(task),
        chunk=task.tiles.chunk, queries=task.queries, seen=task.read_by_tile,
        interpret=interpret is not None,
    )  # fmt: skip
