"""Merges the tails of long texts with what walks of their first pieces left: see `mosaic_tails`.

A Pallas-Triton program has a few rows of a tile and a KV head, of every few of the texts that have
tails; where none has, it ends at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention.combine import AT_ONCE, LOG2E
from pallas_kernels.block_attention.mosaic_tails import texts_with_tails
from pallas_kernels.block_attention.pieces import LOWEST, finish, merge

# Rows, a warp each, which reads 128 numbers by one load. With four rows a warp the loads of several
# pieces were not on their way together, and 110 pieces took 68 µs in place of 19 (one H200).
TOGETHER = 4
TEXTS = 4  # that are merged at once


def combine_tails(
    out: Float[Array, "B T N H"],
    sums: Float[Array, "_ K tiles R H"],
    scales: Float[Array, "_ K tiles R"],
    weights: Float[Array, "_ K tiles R"],
    plan: Int[Array, " _"],
    sinks: Float[Array, " N"] | None,
    *,
    queries: int,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`out`, with the attention of the texts that have tails."""
    B, _, N, _ = out.shape
    K, tiles = sums.shape[1:3]
    blocks = -(-queries * (N // K) // TOGETHER)
    extra = () if sinks is None else (sinks,)
    return pl.pallas_call(
        functools.partial(_kernel, queries=queries, G=N // K, blocks=blocks),
        name="block_attention_tails",
        grid=(blocks * tiles, K, min(B, TEXTS)),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={4 + len(extra): 0},
        compiler_params=plt.CompilerParams(num_warps=TOGETHER, num_stages=1),
        interpret=interpret,
    )(plan, sums, scales, weights, *extra, out)


def _kernel(plan_ref, sums_ref, scales_ref, weights_ref, *rest, queries: int, G: int, blocks: int):
    *sinks_ref, _, out_ref = rest
    B, T, _, H = out_ref.shape
    block, head, turn = (pl.program_id(i) for i in range(3))
    count, nth = texts_with_tails(plan_ref, B, plt.load)
    tile = lax.div(block, jnp.int32(blocks))
    row = lax.rem(block, jnp.int32(blocks)) * TOGETHER + jnp.arange(TOGETHER)
    query = tile * queries + lax.div(row, G)
    real = (row < queries * G) & (query < T)
    wide = functools.partial(jnp.broadcast_to, shape=(TOGETHER, H))
    columns, heads = wide(jnp.arange(H)[None]), head * G + lax.rem(row, G)

    def load(place, there):
        rows, at = real & there, (place, head, tile, row)
        each = wide(row[:, None])
        return (
            plt.load(sums_ref.at[*at[:3], each, columns], mask=wide(rows[:, None]), other=0.0),
            plt.load(scales_ref.at[at], mask=rows, other=LOWEST),
            plt.load(weights_ref.at[at], mask=rows, other=0.0),
        )

    def several(begin, end, i, piece):
        places = [begin + i * AT_ONCE + j for j in range(AT_ONCE)]
        for loaded in [load(B + jnp.minimum(x, end - 1), x < end) for x in places]:
            piece = merge(piece, loaded, _across)
        return piece

    @pl.loop(turn, count, step=min(B, TEXTS))
    def write(n):
        b = nth(n)
        begin, end = (plt.load(plan_ref.at[b + i]) for i in (1, 2))
        loop = functools.partial(several, begin, end)
        piece = lax.fori_loop(0, pl.cdiv(end - begin, AT_ONCE), loop, load(b, True))
        sink = None
        if sinks_ref:
            sink = plt.load(sinks_ref[0].at[heads], mask=real, other=0.0) * LOG2E
        result = finish(piece, sink, _across).astype(out_ref.dtype)
        at = b, wide(query[:, None]), wide(heads[:, None]), columns
        plt.store(out_ref.at[at], result, mask=wide(real[:, None]))


def _across(numbers, like):
    return jnp.broadcast_to(numbers[:, None], like.shape)
