"""Head norms, RoPE and the cache write in Pallas-Triton: one program a sequence and head.

Compiled by itself for an H200, it is five kernels of XLA for a block of 16 tokens at Qwen3-8B's
heads: two reductions, two scatters and the queries. Here each program reads 16 rows of its head
once, as two halves, and writes them where they belong; the caches are updated in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.grid import grid
from pallas_kernels.in_pairs import sum_in_pairs

ROWS = 16  # of a program, whatever T is: so a row is reduced in one order at every width


def heads_to_cache(
    x, q_scale, k_scale, cos, sin, k, v, slots, *, heads, rising=True, interpret=False
):
    """See the folder's contract; rising or not is all one here.

    Without `interpret` it compiles for a GPU only.
    """
    return _to_cache(x, q_scale, k_scale, cos, sin, k, v, slots, heads, interpret)


# An inner jit: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=(8, 9))
def _to_cache(x, q_scale, k_scale, cos, sin, k, v, slots, heads, interpret):
    (B, T), (N, K, H), caches = slots.shape, heads[:3], len(k)
    # Of a shared cache all rows are one sequence's, but each queries' lie by themselves.
    flat = lambda a: a.reshape(*a.shape[:-3], caches, -1, a.shape[-1])  # noqa: E731
    x, cos, sin, slots = flat(x), flat(cos), flat(sin), slots.reshape(caches, -1)
    G = max(1, N // K)
    scales = [s for s in (q_scale, k_scale) if s is not None]
    inputs = [slots, x, cos, sin, *scales]
    kernel = functools.partial(
        _kernel, heads=heads, normed=(q_scale is not None, k_scale is not None), G=G
    )
    # Queries lie as block attention reads them: a KV head's rows together. The transposition that
    # undoes it cancels with the one that attention makes.
    q, k, v = pl.pallas_call(
        kernel,
        name="heads_to_cache",
        grid=(N + 2 * K, caches, pl.cdiv(B * T // caches, ROWS)),
        out_shape=(
            jax.ShapeDtypeStruct((B, max(N, 1) // G, T, G, H), k.dtype),
            jax.typeof(k),
            jax.typeof(v),
        ),
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(*inputs, k, v)
    return q.transpose(0, 2, 1, 3, 4).reshape(B, T, -1, H)[:, :, :N], k, v


def split_heads(x, q_scale, k_scale, cos, sin, heads, dtype, *, interpret=False):
    """The same kernel, whose keys and values go to caches as long as the block."""
    B, T = cos.shape[:2]
    k, v = (jnp.zeros((B, T, heads.num_kv_heads, heads.head_dim), dtype) for _ in "kv")
    slots = jnp.broadcast_to(jnp.arange(T), (B, T))
    return heads_to_cache(
        x, q_scale, k_scale, cos, sin, k, v, slots, heads=heads, interpret=interpret
    )


def _kernel(slots_ref, x_ref, cos_ref, sin_ref, *rest, heads, normed, G):
    *scale_refs, _, _, q_ref, k_ref, v_ref = rest
    N, K, H, eps, (q_first, k_first, v_first), value_norm = heads
    P, rows, half, dtype = x_ref.shape[0], slots_ref.shape[1], H // 2, q_ref.dtype
    head, b = pl.program_id(0), pl.program_id(1)
    row = pl.program_id(2) * ROWS + jnp.arange(ROWS)
    real = (row < rows)[:, None]
    # The column of head 0, if all heads were of this one's kind.
    q_0, k_0, v_0 = (jnp.int32(n) for n in (q_first, k_first - N * H, v_first - (N + K) * H))
    first = lax.select(head < N, q_0, lax.select(head < N + K, k_0, v_0))
    columns = first + head * H + jnp.arange(half)

    def rows_at(offset):
        mask = jnp.broadcast_to(real, (row.size, half))
        pieces = [
            plt.load(grid(x_ref, row, columns + offset, p, b), mask=mask, other=0.0)
            for p in range(P)
        ]
        return functools.reduce(jnp.add, pieces).astype(dtype)

    def angles(ref):
        at = grid(ref, row, jnp.arange(half), b)
        return plt.load(at, mask=jnp.broadcast_to(real, (row.size, half)), other=0.0)

    halves = rows_at(0), rows_at(half)

    def divided(low, high):
        mean = (sum_in_pairs(low * low) + sum_in_pairs(high * high)) / H
        rms = lax.rsqrt(mean + eps)[:, None]
        return low * rms, high * rms

    def normed_and_rotated(scale_ref):
        low, high = (x.astype(jnp.float32) for x in halves)
        if scale_ref is not None:
            # Rounded where RMSNorm rounds: after the division, and after the scale.
            low, high = (
                (scale_ref[pl.ds(i * half, half)][None, :] * x.astype(scale_ref.dtype))
                .astype(dtype)
                .astype(jnp.float32)
                for i, x in enumerate(divided(low, high))
            )
        cos, sin = angles(cos_ref), angles(sin_ref)
        return low * cos - high * sin, high * cos + low * sin

    def store(make, parts):
        for i, part in enumerate(parts):
            at, mask = make(jnp.arange(half) + i * half)
            plt.store(at, part.astype(dtype), mask=mask)

    def cache_at(ref, head):
        slot = plt.load(slots_ref.at[jnp.full(row.shape, b), row], mask=row < rows, other=0)
        inside = (row < rows) & (slot < ref.shape[1])

        def make(dims):
            shape = (row.size, half)
            at = ref.at[
                jnp.full(shape, b),
                jnp.broadcast_to(slot[:, None], shape),
                jnp.full(shape, head),
                jnp.broadcast_to(dims[None, :], shape),
            ]
            return at, jnp.broadcast_to(inside[:, None], shape)

        return make

    def query_at(dims):
        shape, T = (row.size, half), jnp.int32(q_ref.shape[2])
        sequence = b * lax.div(jnp.int32(rows), T) + lax.div(row, T)
        at = q_ref.at[
            jnp.broadcast_to(sequence[:, None], shape),
            jnp.full(shape, lax.div(head, jnp.int32(G))),
            jnp.broadcast_to(lax.rem(row, T)[:, None], shape),
            jnp.full(shape, lax.rem(head, jnp.int32(G))),
            jnp.broadcast_to(dims[None, :], shape),
        ]
        return at, jnp.broadcast_to(real, shape)

    q_scale = scale_refs[0] if normed[0] else None
    k_scale = scale_refs[-1] if normed[1] else None
    if N:

        @pl.when(head < N)
        def _():
            store(query_at, normed_and_rotated(q_scale))

    @pl.when((head >= N) & (head < N + K))
    def _():
        store(cache_at(k_ref, head - N), normed_and_rotated(k_scale))

    @pl.when(head >= N + K)
    def _():
        values = halves
        if value_norm:
            values = divided(*(x.astype(jnp.float32) for x in halves))
        store(cache_at(v_ref, head - N - K), values)
