"""Block attention in Pallas-Triton, for GPUs from sm80 on.

Pallas-Triton rather than jax-triton although JAX will remove it (deprecated since 0.11.0): it
runs on the CPU through an interpreter, needs no package beside JAX, compiles without a GPU and is
an XLA instruction like any other, so it goes into CUDA graphs. jax-triton 0.3.1 does not, 0.4.1
needs a newer triton than many have, and neither has an interpreter. On Hopper `mosaic_gpu` comes
first; for sm80 and sm89 this kernel was compiled, not timed.

The KV axis is split at absolute positions: chunk c is slots [c·C, (c + 1)·C), C a function of the
static sizes, read in sub-blocks that also begin at fixed positions. So a row's bits depend only on
the keys that it sees: the other keys add exact zeros. Chunks that no row sees are skipped and never
read back. Partial results are added by a second small kernel,
`combine`; where one chunk is enough the first writes the result.
Rows of a tile are (t, g), whole query tokens t of one KV head and its group's heads g.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention.combine import LOG2E, combine


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the work is cut; all numbers but `chunk` are powers of two."""

    rows: int  # of (t, g) a program
    slots: int  # a sub-block of the KV axis
    chunk: int  # slots a program, a multiple of `slots`
    warps: int
    stages: int  # of the loads' pipeline

    def __post_init__(self) -> None:
        for name in ("rows", "slots", "warps"):
            size = getattr(self, name)
            assert size > 0 and size & (size - 1) == 0, f"{name} = {size} is no power of two"
        assert min(self.rows, self.slots) >= 16, "a Triton dot takes at least 16 rows and columns"
        assert self.chunk % self.slots == 0, "a chunk is whole sub-blocks"


class Maths(NamedTuple):
    """The contract's options that are known when a program is compiled."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    ring: bool


def default_tiling(
    B: int, T: int, S: int, N: int, K: int, H: int, dtype: Any, window: int | None = None
) -> Tiling:
    """Spills no register and fits sm89's 99 KiB of shared memory; about 256 programs if it can.

    Checked by compiling for sm80, sm89 and sm90.
    """
    if dtype == jnp.float32:  # no tensor cores: the products are made in registers
        rows, slots = (32 if H == 64 else 16), (16 if H == 256 else 32)
    else:
        rows, slots = (64 if H == 256 else 128), (32 if H == 256 else 64)
    rows = min(rows, pl.next_power_of_2(max(16, T * N // K)))
    warps = 8 if rows >= 64 or rows * H * jnp.dtype(dtype).itemsize >= 2**14 else 4
    # A partial result costs as much traffic as 2·rows slots: a chunk holds 128 at least. It holds
    # 4096 at most, lest one long sequence among short ones waits for a few programs, and a 64th
    # of the cache at least, since a program of the second kernel loads a row of every chunk.
    heads = B * K * pl.cdiv(T, rows // (N // K))
    reach = S if window is None else min(S, window + T)
    wanted = min(4096, pl.cdiv(reach, pl.cdiv(256, heads)))
    chunk = pl.cdiv(max(128, wanted, pl.cdiv(S, 64)), slots) * slots
    return Tiling(rows=rows, slots=slots, chunk=chunk, warps=warps, stages=2)


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """See the folder's contract. Without `interpret` it compiles for a GPU only."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    tiling = tiling or default_tiling(B, T, S, N, K, H, k.dtype, window)
    maths = Maths(causal, scale, window, softcap, ring)
    return _attend(q, k, v, lengths, widths, sinks, maths, tiling, interpret)


# A separate jit: the layers of a model then share one compiled kernel (36 of them compile for
# an H200 in 1.3 s instead of 8).
@functools.partial(jax.jit, static_argnames=("maths", "tiling", "interpret"))
def _attend(q, k, v, lengths, widths, sinks, maths: Maths, tiling: Tiling, interpret: bool):
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    G, rows = N // K, tiling.rows
    queries = rows // G  # whole ones of a tile
    chunks, tiles = pl.cdiv(S, tiling.chunk), pl.cdiv(T, queries)
    head = lambda x: lax.div(x, jnp.int32(tiles))  # noqa: E731
    one_number = pl.BlockSpec((None,), lambda x, c, b: (b,))
    whole_head = pl.BlockSpec((None, T, None, G, H), lambda x, c, b: (b, 0, head(x), 0, 0))
    cache = pl.BlockSpec((None, S, None, H), lambda x, c, b: (b, 0, head(x), 0))
    inputs = [lengths, widths, q.reshape(B, T, K, G, H), k, v]
    specs = [one_number, one_number, whole_head, cache, cache]
    if chunks == 1:
        out_shape, out_specs = [jax.ShapeDtypeStruct((B, T, K, G, H), q.dtype)], [whole_head]
        if sinks is not None:
            inputs.append(sinks.reshape(K, G))
            specs.append(pl.BlockSpec((None, G), lambda x, c, b: (head(x), 0)))
    else:
        shape = (B, chunks, K, tiles, rows)
        out_shape = [jax.ShapeDtypeStruct((*shape, *last), jnp.float32) for last in ((H,), (), ())]
        index = lambda x, c, b: (b, c, head(x), lax.rem(x, jnp.int32(tiles)), 0)  # noqa: E731
        per_row = pl.BlockSpec((None, None, None, None, rows), index)
        wide = pl.BlockSpec((None, None, None, None, rows, H), lambda x, c, b: (*index(x, c, b), 0))
        out_specs = [wide, per_row, per_row]
    results = pl.pallas_call(
        functools.partial(
            _chunk_kernel, maths=maths, tiling=tiling, tiles=tiles, single=chunks == 1
        ),
        name="block_attention",
        grid=(K * tiles, chunks, B),  # the heads of a slot lie side by side: read them together
        in_specs=specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
    )(*inputs)
    if chunks == 1:
        return results[0].reshape(q.shape)
    totals, tops, weights = results
    return combine(
        totals, tops, weights, lengths, widths, sinks, jax.ShapeDtypeStruct(q.shape, q.dtype),
        chunk=tiling.chunk, queries=queries, interpret=interpret,
        seen=lambda length, width, tile: _to_read(maths, length, width, T, S),
    )  # fmt: skip


def _chunk_kernel(
    length_ref,  # []
    width_ref,  # []
    q_ref,  # [T, G, H]
    k_ref,  # [S, H]
    v_ref,  # [S, H]
    *rest,  # sinks [G] if `single` and there are any; then the outputs:
    # [T, G, H] if `single`, else a partial sum [rows, H], its maximum [rows] and weight [rows]
    maths: Maths,
    tiling: Tiling,
    tiles: int,
    single: bool,
):
    """One chunk of one tile of rows: an online softmax over its sub-blocks, in base 2."""
    (T, G, H), rows, slots = q_ref.shape, tiling.rows, tiling.slots
    length = length_ref[...]
    width, S = width_ref[...], k_ref.shape[0]
    first, end = _to_read(maths, length, width, T, S)
    begin = pl.program_id(1) * tiling.chunk
    from_block = lax.div(jnp.maximum(first, begin), slots)
    to_block = lax.div(jnp.minimum(end, begin + tiling.chunk) + slots - 1, slots)

    row, queries = jnp.arange(rows), rows // G
    query = lax.rem(pl.program_id(0), tiles) * queries + lax.div(row, G)
    head = lax.rem(row, G)
    real = (row < queries * G) & (query < T)
    at = tuple(
        jnp.broadcast_to(i, (rows, H))
        for i in (query[:, None], head[:, None], jnp.arange(H)[None, :])
    )
    real_wide = jnp.broadcast_to(real[:, None], (rows, H))

    def attend():
        block = plt.load(q_ref.at[at], mask=real_wide, other=0.0)

        def step(i, carry):
            total, top, weight = carry
            slot = i * slots + jnp.arange(slots)
            # Slots that no row sees may hold NaN: they are not read, and count as zeros.
            alive, position, last = (slot >= first) & (slot < end), slot, end
            if maths.ring:
                position, last = _position(slot, length + T, S), length + width
                low = jnp.maximum(length - maths.window + 1, 0)
                alive &= (position >= low) & (position < last)
            live = jnp.broadcast_to(alive[:, None], (slots, H))
            keys = plt.load(k_ref.at[pl.ds(i * slots, slots), :], mask=live, other=0.0)
            scores = _dot(block, keys, trans_b=True)
            if maths.softcap is None:
                scores *= maths.scale * LOG2E
            else:
                capped = jnp.tanh(scores * maths.scale / maths.softcap)
                scores = capped * (maths.softcap * LOG2E)
            seen = _visible(maths, position[None, :], length + query[:, None], last)
            if maths.ring:
                seen &= alive[None, :]
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet
            shrink = jnp.exp2(top - base)
            weights = jnp.exp2(scores - base[:, None])
            values = plt.load(v_ref.at[pl.ds(i * slots, slots), :], mask=live, other=0.0)
            total = total * shrink[:, None] + _dot(weights.astype(values.dtype), values)
            return total, new_top, weight * shrink + jnp.sum(weights, axis=1)

        start = (
            jnp.zeros((rows, H), jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )
        return lax.fori_loop(from_block, to_block, step, start)

    if single:
        *sinks_ref, out_ref = rest
        sink = jnp.full(rows, -jnp.inf)
        if sinks_ref:
            sink = plt.load(sinks_ref[0].at[head], mask=real, other=0.0)
        total, top, weight = attend()
        result = _finish(total, top, weight, sink)
        plt.store(out_ref.at[at], result.astype(out_ref.dtype), mask=real_wide)
    else:
        # As `combine` expects: a chunk that no row sees is not written.
        @pl.when((begin < end) & (begin + tiling.chunk > first))
        def _():
            for ref, value in zip(rest, attend(), strict=True):
                ref[...] = value


def _finish(total, top, weight, sink):
    """total [rows, H] over weight plus the sink's; 0 if nothing was seen.

    total and weight are relative to 2 ** top; the sink is a natural logit.
    """
    sink = sink.astype(jnp.float32) * LOG2E
    base = jnp.maximum(top, sink)
    base = jnp.where(base == -jnp.inf, 0.0, base)
    own = jnp.exp2(top - base)
    whole = weight * own + jnp.exp2(sink - base)
    share = own / jnp.where(whole > 0, whole, 1.0)
    return total * share[:, None]


def _to_read(maths: Maths, length, width, T: int, slots: int):
    """First and end of the slots to read: all, once a ring's last positions have come around."""
    first, end = _seen_by_any(length, width, slots, maths.window)
    if maths.ring:
        around = length + T > slots
        first, end = jnp.where(around, 0, first), jnp.where(around, slots, end)
    return first, end


def _seen_by_any(length, width, slots: int, window: int | None):
    """First and end of the slots that some row of the block may see: no other is read."""
    first = 0 if window is None else jnp.maximum(length - window + 1, 0)
    return first, jnp.minimum(length + width, slots)


def _position(slot, end, slots: int):
    """The last position before `end` that lies at a slot of a ring; below 0 if none does yet."""
    newest = lax.rem(end - 1, jnp.int32(slots))
    return slot + (end - 1 - newest) - jnp.where(slot > newest, slots, 0)


def _visible(maths: Maths, slot, position, end):
    """The contract's mask [rows, slots]."""
    seen = slot < end
    if maths.causal:
        seen &= slot <= position
    if maths.window is not None:
        seen &= position - slot < maths.window
        if not maths.causal:
            seen &= slot - position < maths.window
    return seen


def _dot(a, b, trans_b: bool = False):
    """a @ b in float32: exact products, also of float32 operands."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=trans_b, precision=precision)
