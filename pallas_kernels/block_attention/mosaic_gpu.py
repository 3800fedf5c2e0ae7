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

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention.combine import LOG2E, combine, combine_in_order
from pallas_kernels.block_attention.pieces import LOWEST, finish, merge

ROWS = 64  # of a wgmma
SHARED_BYTES = 227 * 1024  # what one CTA may have on sm90

LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = LAYOUT.reduce(1)
# pyright: reportAbstractUsage=false
SWIZZLED_ROWS = 8
SWIZZLED = (plgpu.TilingTransform((SWIZZLED_ROWS, 64)), plgpu.SwizzleTransform(128))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut. Results depend on `chunk` and `block` in their last bits."""

    chunk: int  # slots a CTA walks
    block: int  # slots loaded and multiplied at a time
    stages: int  # blocks of K and of V on their way or in use
    walk: bool = False  # a CTA takes all chunks in turn, and merges each with those before
    ordered: bool = False  # chunks of several CTAs are merged one after the other, as by a walk

    def __post_init__(self):
        if self.block % 64 or not 64 <= self.block <= 256:
            raise ValueError(f"block is {self.block}: it must be 64, 128, 192 or 256")
        if self.chunk < 1 or self.chunk % self.block:
            raise ValueError(f"chunk is {self.chunk}: it must be a multiple of {self.block=}")
        if not 1 <= self.stages <= self.chunk // self.block:
            raise ValueError(f"stages is {self.stages}: it must be 1 to {self.chunk // self.block}")

    def shared_bytes(self, head_dim: int) -> int:
        """Upper bound of the first kernel's shared memory."""
        columns = min(head_dim, 128)
        once = ROWS * (head_dim + self.block + columns)  # queries, weights, the result
        return 2 * (once + self.stages * self.block * (head_dim + columns)) + 2048


def choose_tiles(B: int, S: int, K: int, H: int) -> Tiles:
    """Tiles for sizes known at compile time.

    T is not among them, so a block of any width is cut alike. A full cache makes about two CTAs a
    multiprocessor; one more chunk costs 64·H floats written and read again, so chunks are 128 at
    least (a whole step of an 8B pair at batch 1 and 2048 slots on an H200: 5.55 ms, with chunks of
    64 5.59; at batch 8 chunks of 512 took 6.99, of 256 7.07, of 128 7.20).
    """
    block = 64
    chunks = max(1, min(2 * 132 // (B * K), S // (2 * block)))
    chunk = -(-S // (chunks * block)) * block
    # Two CTAs a multiprocessor must fit.
    stages = min({64: 4, 128: 2, 256: 1}[H], chunk // block)
    return Tiles(chunk=chunk, block=block, stages=stages)


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
    if H not in (64, 128, 256) or N % K or N // K > 16 or not 1 <= T <= 512:
        raise ValueError(
            "block attention's mosaic_gpu backend takes T 1 to 512, N / K 1 to 16 and "
            f"H 64, 128, 256, not {T=} {N=} {K=} {H=}: use 'xla'"
        )
    tiles = tiles or choose_tiles(B, S, K, H)
    if S % tiles.block:
        raise ValueError(f"a cache of {S} slots: the capacity must be a multiple of {tiles.block}")
    if table is not None and tiles.block != k.shape[1]:
        raise ValueError(f"pages of {k.shape[1]} positions: blocks of {tiles.block} read no table")
    if tiles.shared_bytes(H) > SHARED_BYTES:
        raise ValueError(f"{tiles} does not fit a multiprocessor at {H=}")
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    task = _Task(
        B=B, T=T, S=S, K=K, G=N // K, H=H, tiles=tiles,
        causal=causal, scale=float(scale), window=window, softcap=softcap, ring=ring,
        paged=table is not None,
    )  # fmt: skip
    return _attend(q, k, v, lengths, widths, sinks, task, interpret or None, table)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """The constants of a compiled kernel."""

    B: int
    T: int
    S: int
    K: int
    G: int
    H: int
    tiles: Tiles
    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    ring: bool
    paged: bool = False

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.T, ROWS // self.G)

    @property
    def queries(self) -> int:
        """Whole queries of a row tile: row r is query r // G, head r % G."""
        return pl.cdiv(self.T, self.row_tiles)

    @property
    def chunks(self) -> int:
        """CTAs along the slots."""
        return 1 if self.tiles.walk else pl.cdiv(self.S, self.tiles.chunk)

    @property
    def columns(self) -> int:
        """Columns of the result in a CTA's registers; a wide head takes two CTAs."""
        return min(self.H, 128)

    @property
    def grid(self) -> dict[str, Any]:
        # The last axis runs fastest: CTAs that read the same slots, then neighbours in memory.
        return {
            "grid": (self.B, self.chunks, self.K, self.row_tiles, self.H // self.columns),
            "grid_names": ("batch", "chunk", "head", "tile", "part"),
        }

    def seen(self, length, width, query):
        """[first, last) slot that `query` of the block sees: always one run of slots."""
        # T more than any width: so `last` is a number a row even where all rows see alike.
        last = length + jnp.minimum(query + (1 if self.causal else self.T), width)
        first = jnp.zeros_like(query)
        if self.window is not None:
            first = jnp.maximum(length + query - self.window + 1, 0)
            if not self.causal:
                last = jnp.minimum(last, length + query + self.window)
        return first, last if self.ring else jnp.minimum(last, self.S)

    def seen_by_tile(self, length, width, tile):
        """[first, last) slot that some query of a row tile sees; of a ring, positions."""
        top = tile * self.queries
        return self.seen(length, width, top)[0], self.seen(length, width, top + self.queries - 1)[1]

    def read_by_tile(self, length, width, tile):
        """[first, last) slot to read: all, once a ring's last positions have come around."""
        first, last = self.seen_by_tile(length, width, tile)
        if self.ring:
            around = last > self.S
            first, last = jnp.where(around, 0, first), jnp.where(around, self.S, last)
        return first, last

    def after(self, place, first):
        """How many slots of a ring `place` comes after `first`; both may be positions."""
        steps = lax.rem(place, self.S) - lax.rem(first, self.S)
        return steps + jnp.where(steps < 0, self.S, 0)


# One jit for all call sites: a model of 36 layers compiles the kernels once.
@partial(jax.jit, static_argnames=("task", "interpret"))
def _attend(q, k, v, lengths, widths, sinks, task: _Task, interpret, table=None):
    B, T, K, G, H = task.B, task.T, task.K, task.G, task.H
    n, queries = task.row_tiles, task.queries
    # XLA fuses this into the operation that makes q.
    rows = jnp.pad(q, ((0, 0), (0, n * queries - T), (0, 0), (0, 0)))
    rows = rows.reshape(B, n, queries, K, G, H).transpose(0, 3, 1, 2, 4, 5)
    rows = rows.reshape(B, K, n, queries * G, H)
    if queries * G > SWIZZLED_ROWS:  # TMA takes whole tiles, or one that is not full
        rows = jnp.pad(rows, ((0, 0),) * 3 + ((0, -queries * G % SWIZZLED_ROWS), (0, 0)))
    return _attend_rows(rows, k, v, lengths, widths, sinks, task, interpret, table)


def _attend_rows(rows, k, v, lengths, widths, sinks, task: _Task, interpret, table=None):
    lengths, widths = lengths.astype(jnp.int32), widths.astype(jnp.int32)
    tables = () if table is None else (table.astype(jnp.int32),)
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    if task.chunks == 1:
        return _one_chunk(task, interpret)(rows, k, v, lengths, widths, *tables, *extra)
    accs, tops, totals = _each_chunk(task, interpret)(rows, k, v, lengths, widths, *tables)
    add = combine_in_order if task.tiles.ordered else combine
    return add(
        accs, tops, totals, lengths, widths, sinks, _out_type(task),
        chunk=task.tiles.chunk, queries=task.queries, seen=task.read_by_tile,
        interpret=interpret is not None,
    )  # fmt: skip


def _one_chunk(task: _Task, interpret):
    """The kernel for a cache of one chunk: writes the result itself."""

    def block_attention(q_ref, k_ref, v_ref, lengths_ref, widths_ref, *rest):
        table_ref, rest = _split(task, rest)
        sinks_ref, out_ref, out_s, scratch = rest[:-9], rest[-9], rest[-8], rest[-7:]
        at = _place()
        b, _, head, tile, part = at
        acc, top, total = _walk(
            task, q_ref, k_ref, v_ref, table_ref, lengths_ref[b], widths_ref[b], at, *scratch
        )
        sink = _sink_rows(task, sinks_ref[0], head) if sinks_ref else None
        out_s[...] = finish((acc, top, total), sink, _across).astype(jnp.bfloat16)
        plgpu.commit_smem()
        heads, columns = pl.ds(head * task.G, task.G), pl.ds(part * task.columns, task.columns)
        for i in range(task.queries):
            query = tile * task.queries + i
            written = out_s.at[pl.ds(i * task.G, task.G)]
            copy = partial(plgpu.copy_smem_to_gmem, written, out_ref.at[b, query, heads, columns])
            # The last tile may have fewer queries.
            copy() if task.T % task.queries == 0 else pl.when(query < task.T)(copy)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        block_attention,
        out_type=_out_type(task),
        scratch_types=[plgpu.SMEM((ROWS, task.columns), jnp.bfloat16), *_scratch(task)],
        **task.grid,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _each_chunk(task: _Task, interpret):
    """The kernel of one chunk a CTA: unscaled sums, the maximum of each row and its weights' sum.

    What lies past the sequence or before its window is not written.
    """
    shape = (task.B, task.chunks, task.K, task.row_tiles, ROWS)
    row = jax.ShapeDtypeStruct(shape, jnp.float32)

    def block_attention_chunk(q_ref, k_ref, v_ref, lengths_ref, widths_ref, *rest):
        table_ref, (acc_ref, top_ref, total_ref, *scratch) = _split(task, rest)
        at = _place()
        b, chunk, _, tile, part = at
        length, width = lengths_ref[b], widths_ref[b]
        first, last = task.read_by_tile(length, width, tile)
        begin = chunk * task.tiles.chunk

        @pl.when((begin < last) & (begin + task.tiles.chunk > first))
        def walk():
            acc, top, total = _walk(
                task, q_ref, k_ref, v_ref, table_ref, length, width, at, *scratch
            )
            acc_ref[(*at[:4], slice(None), pl.ds(part * task.columns, task.columns))] = acc

            @pl.when(part == 0)
            def write_rows():
                top_ref[at[:4]] = top
                total_ref[at[:4]] = total

    return plgpu.kernel(
        block_attention_chunk,
        out_type=[jax.ShapeDtypeStruct((*shape, task.H), jnp.float32), row, row],
        scratch_types=_scratch(task),
        **task.grid,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _split(task: _Task, rest):
    """The table's ref, if there is one, and the refs after it."""
    return (rest[0], rest[1:]) if task.paged else (None, rest)


def _place():
    """Indices of this CTA."""
    return tuple(lax.axis_index(name) for name in ("batch", "chunk", "head", "tile", "part"))


def _scratch(task: _Task):
    tiles = task.tiles

    def operand(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    return [
        operand(ROWS, task.H),
        operand(tiles.stages, tiles.block, task.H),
        operand(tiles.stages, tiles.block, task.columns),
        # The weights pass through shared memory: ptxas before 13.3 is reported to miscompile a
        # pipelined wgmma whose left operand is in registers.
        operand(ROWS, tiles.block),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=tiles.stages),
        plgpu.Barrier(num_barriers=tiles.stages),
    ]


def _walk(
    task: _Task,
    q_ref,  # [B, K, tiles, up to ROWS, H]
    k_ref,  # [B, S, K, H], or pages [_, block, K, H]
    v_ref,
    table_ref,  # [B, S / block]: the page of each block; None without pages
    length,
    width,
    at,  # batch, chunk, head, tile, part
    q_s,  # [ROWS, H]
    k_s,  # [stages, block, H]
    v_s,  # [stages, block, columns]
    p_s,  # [ROWS, block]
    q_bar,
    k_bar,
    v_bar,
):
    """The online softmax over a chunk's visible blocks, or over all of them: sums of values
    [ROWS, columns], the scale of each row and the sum of its weights [ROWS], see `pieces`.
    """
    b, chunk, head, tile, part = at
    block, stages, steps = task.tiles.block, task.tiles.stages, task.tiles.chunk // task.tiles.block
    first, last = task.seen_by_tile(length, width, tile)
    first_read, last_read = task.read_by_tile(length, width, tile)
    begin, end = lax.div(first_read, block), lax.div(last_read + block - 1, block)
    if not task.tiles.walk:
        begin, end = jnp.maximum(chunk * steps, begin), jnp.minimum((chunk + 1) * steps, end)

    def fetch(i):
        slot = lax.rem(i - begin, stages)
        if task.paged:
            here = (table_ref[b, i], pl.ds(0, block), head)
        else:
            here = (b, pl.ds(i * block, block), head)
        values = v_ref.at[(*here, pl.ds(part * task.columns, task.columns))]
        plgpu.copy_gmem_to_smem(k_ref.at[here], k_s.at[slot], k_bar.at[slot])
        plgpu.copy_gmem_to_smem(values, v_s.at[slot], v_bar.at[slot])

    # Rows past the last are zeros by TMA.
    plgpu.copy_gmem_to_smem(q_ref.at[b, head, tile, pl.ds(0, ROWS)], q_s, q_bar)
    for i in range(stages):
        pl.when(begin + i < end)(partial(fetch, begin + i))
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
    row_first, row_last = task.seen(length, width, tile * task.queries + lax.div(row, task.G))
    row_begin = lax.rem(row_first, task.S)  # of a ring: the slot
    plgpu.barrier_wait(q_bar)

    def step(i, carry):
        acc, top, total = carry
        slot = lax.rem(i - begin, stages)
        plgpu.barrier_wait(k_bar.at[slot])

        def qk(acc_ref):
            plgpu.wgmma(acc_ref, q_s, k_s.at[slot].transpose((1, 0)))
            return acc_ref[...]

        logits = _logits(
            task, pl.run_scoped(qk, plgpu.WGMMAAccumulatorRef((ROWS, block), jnp.float32))
        )
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=LAYOUT)
        if task.ring:
            after = column - _across(row_begin - i * block, column)
            after += jnp.where(after < 0, task.S, 0)
            visible = after < _across(row_last - row_first, column)
        else:
            visible = column < _across(row_last - i * block, column)
            if task.window is not None:
                visible &= column >= _across(row_first - i * block, column)
        logits = jnp.where(visible, logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.round(logits.max(axis=1)))
        weights = jnp.exp2(logits - _across(new_top, logits))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)

        p_s[...] = weights.astype(jnp.bfloat16)
        plgpu.barrier_wait(v_bar.at[slot])
        # 0 * NaN is NaN, and slots that no row sees may hold one. At most two blocks have any.
        if task.ring:
            dead = task.S - (last - first)
            outside = task.after(i * block, last) < dead
            outside |= (task.after(last, i * block) < block) & (dead > 0)
            pl.when(outside)(lambda: _clear_ring(task, v_s.at[slot], i * block, first, last))
        else:
            outside = (i + 1) * block > last
            if task.window is not None:
                outside |= i * block < first
            pl.when(outside)(lambda: _clear(v_s.at[slot], first - i * block, last - i * block))
        plgpu.commit_smem()

        def pv(acc_ref):
            plgpu.wgmma(acc_ref, p_s, v_s.at[slot])
            return acc_ref[...]

        added = pl.run_scoped(pv, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))
        acc = acc * _across(shrink, acc) + added
        if task.tiles.walk or steps > stages:
            pl.when(i + stages < end)(partial(fetch, i + stages))
        return acc, new_top, total

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, task.columns), jnp.float32), LAYOUT)
    zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW_LAYOUT)
    lowest = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
    nothing = (zeros, lowest, zero)
    if not task.tiles.walk:
        return lax.fori_loop(begin, end, step, nothing)

    def piece(j, before):
        first, last = jnp.maximum(begin, j * steps), jnp.minimum(end, (j + 1) * steps)
        return merge(before, lax.fori_loop(first, last, step, nothing), _across)

    return lax.fori_loop(lax.div(begin, steps), lax.div(end + steps - 1, steps), piece, nothing)


def _across(per_row, like):
    """[ROWS] to the shape of `like` [ROWS, …]."""
    return lax.broadcast_in_dim(per_row, like.shape, [0])


def _logits(task: _Task, products):
    """Scores in units of log 2, for exp2."""
    if task.softcap is None:
        return products * (task.scale * LOG2E)
    # The device's tanh has only 11 good bits, which is too few once multiplied by the cap.
    twice = jnp.exp2(products * (2 * task.scale * LOG2E / task.softcap))
    return task.softcap * LOG2E - (2 * task.softcap * LOG2E) / (twice + 1)


def _clear(v_s, first, last):
    """Zeroes the rows of v_s [block, columns] outside [first, last)."""
    row = plgpu.broadcasted_iota(jnp.int32, v_s.shape, 0, layout=LAYOUT)
    values = plgpu.load(v_s, layout=LAYOUT)
    v_s[...] = jnp.where((row >= first) & (row < last), values, jnp.zeros_like(values))


def _clear_ring(task: _Task, v_s, begin, first, last):
    """Zeroes rows of v_s, a ring's slots from begin, whose position is not in [first, last)."""
    row = plgpu.broadcasted_iota(jnp.int32, v_s.shape, 0, layout=LAYOUT)
    values = plgpu.load(v_s, layout=LAYOUT)
    seen = task.after(row + begin, first) < last - first
    v_s[...] = jnp.where(seen, values, jnp.zeros_like(values))


def _sink_rows(task: _Task, sinks_ref, head):
    """The sink of every row's query head, in units of log 2: [ROWS]."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
    sink = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
    for g in range(task.G):
        sink = jnp.where(lax.rem(row, task.G) == g, sinks_ref[head * task.G + g] * LOG2E, sink)
    return sink


def _out_type(task: _Task):
    return jax.ShapeDtypeStruct((task.B, task.T, task.K * task.G, task.H), jnp.bfloat16)
