"""What every attention backend must do, as checks of a function on inputs that tell.

On a CPU the Triton kernel runs through Pallas'
interpreter, at small shapes cut into small pieces; on a GPU the compiled backends run at real
shapes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_attention import (
    Sizes,
    block_attention,
    refusal,
    triton,
)
from pallas_kernels.shapes import BlockShape

ON_GPU = jax.default_backend() == "gpu"
# As users have it, and for what runs long; tests/conftest.py compiles the rest badly on a CPU.
FULLY = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
# Any sizes at all, for what is plain JAX. B, T, S, N, K, H
SHAPES = [(1, 16, 64, 4, 2, 16), (3, 7, 40, 6, 2, 24), (2, 1, 33, 4, 4, 16), (4, 5, 24, 8, 1, 32)]
# The real shapes with less of what an interpreter is slow at, and capacities that nothing divides.
CUT = {
    "qwen3": BlockShape(B=3, T=16, S=100, N=4, K=1, H=128, context=70),
    "draft": BlockShape(B=2, T=10, S=130, N=4, K=2, H=64, context=90, causal=False),
    "gpt-oss": BlockShape(B=2, T=8, S=128, N=8, K=1, H=64, context=90, window=40, sinks=True),
    "gemma2": BlockShape(B=2, T=3, S=90, N=4, K=2, H=256, context=60, window=50, softcap=5.0),
}
# Mosaic's kernel takes whole blocks of 64 slots only.
SMALLEST = BlockShape(B=2, T=5, S=128 if ON_GPU else 70, N=4, K=2, H=64, context=40)
# Several tiles of rows, chunks and sub-blocks even there; and one chunk, so no second kernel.
TILING = triton.Tiling(rows=16, slots=16, chunk=32, warps=4, stages=2)
ONE_CHUNK = triton.Tiling(rows=32, slots=32, chunk=160, warps=4, stages=2)
INTERPRETED = {
    "triton": functools.partial(triton.block_attention, interpret=True, tiling=TILING),
    "triton, one chunk": functools.partial(
        triton.block_attention, interpret=True, tiling=ONE_CHUNK
    ),
}
# Of the largest entry of a row. bfloat16 keeps 8 bits, and both the weights and the result are
# rounded to them; in float32 it is what the exponents lose.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


def can_run(backend: str, head_dim: int, dtype) -> bool:
    """Whether it can be tested here: compiled on a GPU, on a CPU interpreted or plain JAX."""
    if not ON_GPU:
        return backend == "xla" or backend in INTERPRETED
    return refusal(backend, Sizes(1, 1, head_dim, dtype), jax.devices()[0]) is None


@functools.cache
def make_attend(backend: str, shape: BlockShape):
    """The backend with the shape's options, jitted: f(q, k, v, lengths, widths)."""
    attend = functools.partial(block_attention, backend=backend)
    if backend in INTERPRETED and not ON_GPU:
        attend = INTERPRETED[backend]
    sinks = jax.random.normal(jax.random.key(9), (shape.N,)) if shape.sinks else None
    how = {name: getattr(shape, name) for name in ("causal", "window", "softcap")}
    attend = functools.partial(attend, scale=shape.H**-0.5, sinks=sinks, **how)
    attend = jax.jit(attend, compiler_options=FULLY if backend == "xla" else {})
    if backend != "reference":
        return attend
    # One sequence at a time: all at once would not fit a GPU's memory.
    return lambda *args: np.concatenate(
        [attend(*(x[b : b + 1] for x in args)) for b in range(shape.B)]
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def inputs(shape, dtype=jnp.float32, seed=0):
    B, T, S, N, K, H = shape[:6]

    def draw(i, *sizes):
        key = jax.random.key(3 * seed + i, impl="rbg")  # a tenth of the default's compile time
        return jax.random.normal(key, sizes).astype(dtype)

    return draw(0, B, T, N, H), draw(1, B, S, K, H), draw(2, B, S, K, H)


def edges(shape):
    """Lengths 0, 1, in between and as long as fits; widths from 1 to T."""
    B, T, S = shape[:3]
    lengths = np.resize([0, 1, S // 2, S - T], B)
    widths = np.resize([T, 1, (T + 1) // 2], B)
    return lengths, widths


def settings(shape: BlockShape, chunk: int, block: int):
    """Lengths around every kind of edge, each with another width, as many at a time as fit B."""
    B, T, S = shape[:3]
    around = [0, 1, block - 1, block, block + 1, chunk - 1, chunk, chunk + 1, S // 2, S - T, S]
    lengths = [n for n in around if n <= S]
    lengths = np.resize(lengths, -(-len(lengths) // B) * B)
    widths = np.resize([T, 1, (T + 1) // 2, T, max(1, T - 1)], len(lengths))
    for i in range(0, len(lengths), B):
        yield lengths[i : i + B], widths[i : i + B]


@functools.partial(jax.jit, static_argnums=(0, 1))
def loud_at_edges(shape: BlockShape, dtype, seed, lengths, widths):
    """q, k, v, and k, v again with NaN and infinities in every slot that no query sees.

    Keys near the block, and near where a window begins, win most of the weight: one of them too
    many or too few then shows in bfloat16 too, however long the context.
    """
    q, k, v = inputs(shape, dtype, seed)
    slot, length = jnp.arange(shape.S)[None, :], lengths[:, None]
    near, dead = abs(slot - length) <= shape.T, slot >= length + widths[:, None]
    if shape.window is not None:
        near |= abs(slot - length + shape.window) <= shape.T
        dead |= slot <= length - shape.window
    push = jnp.asarray((4 * shape.H**-0.5) ** 0.5, dtype)
    k = jnp.where(near[:, :, None, None], k + push, k)
    poison = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf], dtype)[slot % 3][:, :, None, None]
    return (q + push, k, v), [jnp.where(dead[:, :, None, None], poison, x) for x in (k, v)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_query_in_noise(shape: BlockShape, dtype, seed, b, row):
    """q, k, v of which only q[b, row] and the first context + T slots of b are always the same."""
    seen = shape.context + shape.T
    query, keys, values = inputs((1, 1, seen, *shape[3:6]), dtype, 1)
    q, k, v = inputs(shape, dtype, 100 + seed)
    return (
        q.at[b, row].set(query[0, 0]),
        k.at[b, :seen].set(keys[0]),
        v.at[b, :seen].set(values[0]),
    )


def assert_close(got, want, dtype):
    assert got.dtype == dtype
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    size = np.abs(want).max(axis=-1, keepdims=True)
    worst = (np.abs(got - want) / np.where(size > 0, size, 1)).max()
    assert worst <= TOLERANCE[dtype], f"error {worst:.1e} of a row's largest entry"


def assert_same_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def check_shape(attend, shape: BlockShape, dtype, chunk: int, block: int):
    """At all settings: close to the reference, and the same bits again when dead slots are NaN."""
    for seed, (lengths, widths) in enumerate(settings(shape, chunk, block)):
        (q, k, v), dead = loud_at_edges(shape, dtype, seed, lengths, widths)
        exact = (x.astype(jnp.float32) for x in (q, k, v))
        want = make_attend("reference", shape)(*exact, lengths, widths)
        got = attend(q, k, v, lengths, widths)
        assert_close(got, want, dtype)
        assert_same_bits(attend(q, *dead, lengths, widths), got)


def check_bits(attend, shape: BlockShape, dtype):
    """One query at one position against the same keys gives the same bits, whichever row of its
    block it is, hence whatever the length, and whatever all other rows and slots hold."""
    B, T, S = shape[:3]
    position = shape.context + T - 1
    results = []
    for row, b in itertools.product(sorted({0, 1, T // 2, T - 1} & set(range(T))), range(B)):
        q, k, v = one_query_in_noise(shape, dtype, row, b, row)
        lengths, widths = np.arange(B) * 7 % (S - T), np.full(B, T)
        lengths[b] = position - row
        # A causal query does not see what comes after it in its block; the other kind has to be
        # the last one for its keys to be the same.
        widths[b] = T if shape.causal and b % 2 else row + 1
        results.append(np.asarray(attend(q, k, v, lengths, widths)[b, row], np.float32))
    for other in results[1:]:
        assert_same_bits(other, results[0])


def by_hand(q, k, v, lengths, widths, causal, window=None, sinks=None, softcap=None):
    """The contract once more, in numpy with loops and float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, H = q.shape
    out = np.zeros_like(q)
    for b, t in itertools.product(range(B), range(T)):
        length, position = int(lengths[b]), int(lengths[b]) + t
        seen = [*range(length), *range(length, length + int(widths[b]))]
        seen = [s for s in seen if s < k.shape[1] and (s <= position or not causal)]
        if window is not None:
            seen = [s for s in seen if abs(position - s) < window]
        for n in range(N):
            kv = n // (N // k.shape[2])
            scores = k[b, seen, kv] @ q[b, t, n] * H**-0.5
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(np.float64(sinks[n])) if sinks is not None else 0)
            out[b, t, n] = weights / total @ v[b, seen, kv] if seen else 0
    return out
