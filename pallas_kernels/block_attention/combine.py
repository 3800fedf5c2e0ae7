"""Adds the chunks of a split KV axis: one Pallas-Triton program a query and head.

A program reads all chunks of its row at once and sums them in a tree that only the number of
chunks decides. A chunk that no row of the tile saw was never written: it is not read, and adds
exactly 0. Pallas-Triton also combines after the Mosaic GPU kernel: on an H200, at batch 1 and 2048
slots, it took 2.3 to 2.7 µs there and 2.4 µs after the Triton kernel, and a Mosaic kernel that
read chunk by chunk took 4.9.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention.pieces import LOWEST, finish, merge

LOG2E = math.log2(math.e)


def combine(
    totals: Float[Array, "B C K tiles R H"],
    tops: Float[Array, "B C K tiles R"],
    weights: Float[Array, "B C K tiles R"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    sinks: Float[Array, " N"] | None,
    out: jax.ShapeDtypeStruct,
    *,
    chunk: int,
    queries: int,
    seen: Callable,
    interpret: bool = False,
    body: Callable | None = None,
    warps: int | None = None,
) -> Float[Array, "B T N H"]:
    """Weighted sums of values, relative to 2 ** top, and sums of weights: the attention `out`.

    `body` and `warps` are of a program, by default one that reads all chunks at once. Row (t, g) of
    a KV head is row (t % queries)·G + g of tile t // queries. `seen(length, width, tile)` gives the
    first slot that some row of the tile sees, and the end of them.
    """
    (B, T, N, H), (chunks, K) = out.shape, totals.shape[1:3]
    G = N // K

    def place(t, n):
        row = lax.rem(t, jnp.int32(queries)) * G + lax.rem(n, jnp.int32(G))
        return lax.div(n, jnp.int32(G)), lax.div(t, jnp.int32(queries)), row

    one_number = pl.BlockSpec((None,), lambda t, n, b: (b,))
    per_chunk = pl.BlockSpec((None, chunks, None, None, None), lambda t, n, b: (b, 0, *place(t, n)))
    wide = pl.BlockSpec(
        (None, chunks, None, None, None, H), lambda t, n, b: (b, 0, *place(t, n), 0)
    )
    inputs = [lengths, widths, totals, tops, weights]
    specs = [one_number, one_number, wide, per_chunk, per_chunk]
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32))
        specs.append(pl.BlockSpec((None,), lambda t, n, b: (n,)))
    return pl.pallas_call(
        functools.partial(body or _kernel, chunk=chunk, queries=queries, seen=seen),
        name="block_attention_combine",
        grid=(T, N, B),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, None, H), lambda t, n, b: (b, t, n, 0)),
        out_shape=out,
        compiler_params=plt.CompilerParams(
            num_warps=warps or (4 if pl.next_power_of_2(chunks) * H >= 4096 else 2), num_stages=1
        ),
        interpret=interpret,
    )(*inputs)


def combine_in_order(totals, tops, weights, lengths, widths, sinks, out, **how):
    """`combine` in the canonical form: ascending, as a kernel that walks all pieces merges them."""
    programs, H = math.prod(out.shape[:3]), out.shape[-1]
    how["warps"] = 4 if H > 128 and programs <= FEW_PROGRAMS else 2
    return combine(totals, tops, weights, lengths, widths, sinks, out, **how, body=_kernel_in_order)


AT_ONCE = 8  # chunks whose loads are on their way together
# Of wide heads. 2,048 programs of 128 numbers took 3.1 µs by two warps and 4.7 by four after 1,000
# tokens, 512 of them 14.7 and 16.6 after 30,000; 2,048 of 256 numbers 3.6 and 5.2, but 16 of them
# 2.2 and 1.3 (one H200, jax 0.11.2, 2026-11-29).
FEW_PROGRAMS = 1024


def _kernel_in_order(length_ref, width_ref, totals_ref, tops_ref, weights_ref, *rest, **how):
    chunks, H = totals_ref.shape
    chunk = how["chunk"]
    tile = lax.div(pl.program_id(0), jnp.int32(how["queries"]))
    first, end = how["seen"](length_ref[...], width_ref[...], tile)
    *sink_ref, out_ref = rest
    columns = jnp.arange(H)

    def load(j):
        written = (j * chunk < end) & ((j + 1) * chunk > first) & (j < chunks)
        at = jnp.minimum(j, chunks - 1)
        wide = jnp.broadcast_to(written, (H,))
        return (
            plt.load(totals_ref.at[jnp.full((H,), at), columns], mask=wide, other=0.0),
            plt.load(tops_ref.at[at], mask=written, other=LOWEST),
            plt.load(weights_ref.at[at], mask=written, other=0.0),
        )

    def several(i, piece):
        for loaded in [load(i * AT_ONCE + j) for j in range(min(AT_ONCE, chunks))]:
            piece = merge(piece, loaded, _across)
        return piece

    nothing = jnp.zeros((H,), jnp.float32), jnp.float32(LOWEST), jnp.float32(0)
    begin, stop = lax.div(first, chunk * AT_ONCE), pl.cdiv(end, chunk * AT_ONCE)
    piece = lax.fori_loop(begin, stop, several, nothing)
    sink = sink_ref[0][...] * LOG2E if sink_ref else None
    out_ref[...] = finish(piece, sink, _across).astype(out_ref.dtype)


def _across(number, like):
    return jnp.broadcast_to(number, like.shape)


def _kernel(
    length_ref,  # []
    width_ref,  # []
    totals_ref,  # [chunks, H]
    tops_ref,  # [chunks]
    weights_ref,  # [chunks]
    *rest,  # the head's sink [] if there is one; then the output [H]
    chunk: int,
    queries: int,
    seen: Callable,
):
    chunks, H = totals_ref.shape
    padded = pl.next_power_of_2(chunks)
    tile = lax.div(pl.program_id(0), jnp.int32(queries))
    first, end = seen(length_ref[...], width_ref[...], tile)
    begin = jnp.arange(padded) * chunk
    written = (begin < end) & (begin + chunk > first)
    wide, every = jnp.broadcast_to(written[:, None], (padded, H)), pl.ds(0, padded)
    tops = plt.load(tops_ref.at[every], mask=written, other=-jnp.inf)
    weights = plt.load(weights_ref.at[every], mask=written, other=0.0)
    totals = plt.load(totals_ref.at[every, :], mask=wide, other=0.0)
    *sink_ref, out_ref = rest
    sink = sink_ref[0][...] * LOG2E if sink_ref else -jnp.inf
    top = jnp.maximum(jnp.max(tops, axis=0), sink)
    share = jnp.exp2(tops - jnp.where(top == -jnp.inf, 0.0, top))
    weight = jnp.sum(weights * share, axis=0)
    if sink_ref:
        weight += jnp.exp2(sink - top)
    total = jnp.sum(totals * share[:, None], axis=0)
    # A row that sees nothing has sums of 0 and stays 0.
    out_ref[...] = (total / jnp.where(weight > 0, weight, 1.0)).astype(out_ref.dtype)
