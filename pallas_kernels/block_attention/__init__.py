"""Attention of a speculative block to a cache: the contract, the backends and their limits.

Axes: B batch, T query tokens, S cache slots, N query heads, K KV heads, G = N / K, H head dim.
The block's keys and values already lie in the cache, at slots lengths[b] … lengths[b] + T - 1;
slot and position are one, but for a `ring`. Query i of sequence b, at position p = lengths[b] + i,
sees
- every slot below lengths[b] (its context), and
- slot lengths[b] + j of the block when j < widths[b] and, if causal, also j <= i;
- of these, with a window, only slots s with p - s < window and, if not causal, s - p < window.
A causal window is transformers' sliding window; the two-sided one is dflash's, whose far ends are
window - 1 away (transformers' bidirectional mask reaches one further).

With `ring` (and a window) a cache may hold fewer slots than positions: position p lies at slot
p % S, so slot s holds the last position of its kind below lengths[b] + T, or none yet. S must be
window + T - 1 at least, unless no position reaches S.

With a `table` the caches are pools of pages of PAGE positions: position p of sequence b lies at
place p % PAGE of page table[b, p // PAGE], and S is PAGE times the table's columns. Sequences may
share a page. An entry that is no page stands for positions that nothing sees, or for rows of no
meaning. READ_TABLES read through the table; for the others the pages are first gathered.

A slot that no query of the block can see (at or above lengths + widths, or at or below
lengths - window) may hold anything, NaN included, without effect; the others must be finite. Rows
i >= widths[b] are padding: finite, without meaning. A row that sees nothing is 0.

Query head n reads KV head n // G. A score is q·k * scale; softcap makes it
softcap * tanh(score / softcap); sinks[n] is one more logit in head n's softmax, with no value.
Scores, softmax and sums are float32, the result has q's dtype.

By "canonical" a row's bits depend only on what it sees: not on B, T, S, the row's place in the
block, its neighbours or who computes which piece. Positions are cut at multiples of 256; a piece is
walked in ascending blocks of 64 by one online softmax, and pieces are merged in ascending order by
one formula (`pieces`). What a row does not see is left out exactly. It is for Hopper and bfloat16,
and takes a prompt's chunk, up to 2048 tokens, as a block. "mosaic_gpu" and "triton"
cut by B, S and the heads; with "cpu" too a row's bits depend only on its query and what it sees.
On an H200 (jax 0.11.2, 2026-11-22) 63 runs of B 1 and 8, T 1, 5, 16, 128 and 512, two capacities,
walked and split, causal, with a window and with a soft cap, gave 0 differing bits.
"""

import functools
import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import canonical, cpu, mosaic_gpu, reference, triton, xla
from pallas_kernels.choice import check, device_refusal

BACKENDS = {
    "canonical": canonical,
    "mosaic_gpu": mosaic_gpu,
    "triton": triton,
    "cpu": cpu,
    "xla": xla,
    "reference": reference,
}
# The limits of the two kernels, the better one first; xla and reference take any sizes and types.
MAX_WIDTH, HEAD_DIMS = 32, (64, 128, 256, 512)
MAX_GROUPS = {"mosaic_gpu": mosaic_gpu.MAX_GROUPS, "triton": 16, "canonical": mosaic_gpu.MAX_GROUPS}
PAGE = 64  # positions
READ_TABLES = ("cpu", "canonical", "mosaic_gpu")  # of the others the pages are gathered
MAX_CHUNK = 2048  # tokens of a prompt's chunk, which the canonical kernel takes as a block
KERNEL_DTYPES = {
    "mosaic_gpu": ("bfloat16",),
    "triton": ("bfloat16", "float32"),
    "canonical": ("bfloat16",),
}


class Sizes(NamedTuple):
    """The sizes that a backend must support: T, G, H and the dtype of q and the cache."""

    width: int
    groups: int
    head_dim: int
    dtype: Any


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    backend: str,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
    table: Int[Array, "B _"] | None = None,
) -> Float[Array, "B T N H"]:
    """See the module's contract.

    ValueError for a backend that is not one of BACKENDS or lacks these sizes. Only `refusal` looks
    at the device, once, because a program may be compiled for another device.
    """
    T, N, H = q.shape[1:]
    sizes = Sizes(T, N // k.shape[2], H, k.dtype)
    check("attention", sys.modules[__name__], backend, [sizes], None)
    if not q.dtype == k.dtype == v.dtype and backend in KERNEL_DTYPES:
        raise ValueError(
            f"attention backend {backend!r} takes one dtype, not q {q.dtype}, k {k.dtype} and "
            f"v {v.dtype}: use 'xla'"
        )
    if window is not None and window < 1:
        raise ValueError(f"block attention's window is {window}: it must be at least 1, or None")
    if ring and window is None:
        raise ValueError("a ring of block attention needs a window: it holds no other positions")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"block attention's softcap is {softcap}: it must be above 0, or None")
    op = functools.partial(
        BACKENDS[backend].block_attention,
        causal=causal, scale=scale, window=window, sinks=sinks, softcap=softcap, ring=ring,
    )  # fmt: skip
    if table is None:
        return op(q, k, v, lengths, widths)
    if ring or k.shape[1] != PAGE:
        raise ValueError(f"a table is for pages of {PAGE} positions, not {k.shape[1]}, and no ring")
    if backend in READ_TABLES:
        return op(q, k, v, lengths, widths, table=table)
    return op(q, gathered(k, table), gathered(v, table), lengths, widths)


def gathered(pool: Float[Array, "_ _ K H"], table: Int[Array, "B _"]) -> Float[Array, "B S K H"]:
    """The pages of each sequence side by side."""
    pages = jnp.take(pool, table, axis=0, mode="clip")
    return pages.reshape(table.shape[0], -1, *pool.shape[2:])


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    if backend == "cpu":
        return device_refusal("cpu", device)
    if backend not in KERNEL_DTYPES:
        return None
    head_dims = HEAD_DIMS[:-1] if backend == "triton" else HEAD_DIMS
    if sizes.head_dim not in head_dims:
        return f"has head dims {', '.join(map(str, head_dims))}, not {sizes.head_dim}"
    widest = MAX_CHUNK if backend == "canonical" else MAX_WIDTH
    if not 1 <= sizes.width <= widest:
        return f"has blocks of 1 to {widest} tokens, not {sizes.width}"
    most = MAX_GROUPS[backend]
    if not 1 <= sizes.groups <= most:
        return f"has 1 to {most} query heads a KV head, not {sizes.groups}"
    dtypes, dtype = KERNEL_DTYPES[backend], jnp.dtype(sizes.dtype).name
    if dtype not in dtypes:
        return f"has caches of {' and '.join(dtypes)}, not {dtype}"
    return device_refusal("triton" if backend == "triton" else "mosaic_gpu", device)
