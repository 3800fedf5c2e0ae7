"""Both attention ops: every backend against the float32 reference, and the contract's promises.

On a CPU the Triton kernel runs through Pallas' interpreter, at small shapes cut into small pieces
(Mosaic's has a file of its own); on a GPU the same tests run the compiled backends at real shapes.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import (
    BACKENDS,
    Sizes,
    block_attention,
    check_backend,
    default_backend,
    mosaic_gpu,
    triton,
)
from pallas_kernels.prefill_attention import BACKENDS as PREFILL_BACKENDS
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.shapes import BLOCK_ATTENTION, BlockShape

ROOT = Path(__file__).parents[1]
ON_GPU = jax.default_backend() == "gpu"
# What is compiled once and run a few times on a CPU is better compiled badly.
HASTY = {} if ON_GPU else {"xla_backend_optimization_level": 0}
# Any sizes at all, for what is plain JAX. B, T, S, N, K, H
SHAPES = [(1, 16, 64, 4, 2, 16), (3, 7, 40, 6, 2, 24), (2, 1, 33, 4, 4, 16), (4, 5, 24, 8, 1, 32)]
# The real shapes with less of what an interpreter is slow at, and capacities that nothing divides.
CUT = {
    "qwen3": BlockShape(B=3, T=16, S=100, N=4, K=1, H=128, context=70),
    "draft": BlockShape(B=2, T=10, S=130, N=4, K=2, H=64, context=90, causal=False),
    "gpt-oss": BlockShape(B=2, T=8, S=128, N=8, K=1, H=64, context=90, window=40, sinks=True),
    "gemma2": BlockShape(B=2, T=3, S=90, N=4, K=2, H=256, context=60, window=50, softcap=5.0),
}
# In float32 only: groups that are no power of two, the widest block, the narrowest.
CUT_32 = {
    "qwen2.5-7b": BlockShape(B=2, T=5, S=100, N=14, K=2, H=64, context=60),
    "widest": BlockShape(B=1, T=32, S=96, N=16, K=1, H=64, context=50),
    "narrowest": BlockShape(B=3, T=1, S=70, N=2, K=2, H=64, context=40, causal=False, window=9),
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
    try:
        check_backend(backend, Sizes(1, 1, head_dim, dtype), jax.devices()[0])
    except ValueError:
        return False
    return True


def cases(shapes: dict[str, BlockShape], *dtypes) -> list:
    """shape, dtype, backend: all that can be tested here."""
    backends = ("mosaic_gpu", "triton", "xla") if ON_GPU else ("triton", "xla")
    return [
        pytest.param(shape, dtype, backend, id=f"{name}-{jnp.dtype(dtype).name}-{backend}")
        for (name, shape), dtype, backend in itertools.product(shapes.items(), dtypes, backends)
        if can_run(backend, shape.H, dtype)
    ]


def real_shapes() -> list:
    if ON_GPU:
        return cases(BLOCK_ATTENTION, jnp.bfloat16, jnp.float32)
    return cases(CUT, jnp.bfloat16, jnp.float32) + cases(CUT_32, jnp.float32)


@functools.cache
def make_attend(backend: str, shape: BlockShape):
    """The backend with the shape's options, jitted: f(q, k, v, lengths, widths)."""
    attend = functools.partial(block_attention, backend=backend)
    if backend in INTERPRETED and not ON_GPU:
        attend = INTERPRETED[backend]
    sinks = jax.random.normal(jax.random.key(9), (shape.N,)) if shape.sinks else None
    how = {name: getattr(shape, name) for name in ("causal", "window", "softcap")}
    attend = functools.partial(attend, scale=shape.H**-0.5, sinks=sinks, **how)
    attend = jax.jit(attend, compiler_options={} if backend == "xla" else HASTY)
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


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=HASTY)
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


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=HASTY)
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_contract(shape, causal):
    q, k, v = inputs(shape)
    lengths, widths = edges(shape)
    sinks = jax.random.normal(jax.random.key(3), (shape[3],))
    for window, sink, softcap in [(None, None, None), (3, None, None), (5, sinks, 1.5)]:
        how = {"causal": causal, "window": window, "sinks": sink, "softcap": softcap}
        attend = functools.partial(block_attention, scale=shape[-1] ** -0.5, backend="reference")
        attend = jax.jit(functools.partial(attend, **how), compiler_options=HASTY)
        got = attend(q, k, v, lengths, widths)
        np.testing.assert_allclose(got, by_hand(q, k, v, lengths, widths, **how), atol=2e-6)


@pytest.mark.parametrize("dtype,tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_xla_takes_any_sizes(shape, causal, dtype, tolerance):
    q, k, v = inputs(shape, dtype)
    how = {"causal": causal, "scale": shape[-1] ** -0.5}
    reference, xla = (
        jax.jit(functools.partial(block_attention, **how, backend=name), compiler_options=HASTY)
        for name in ("reference", "xla")
    )
    for lengths, widths in [edges(shape), tuple(x[::-1] for x in edges(shape))]:
        args = (q, k, v, lengths, widths)
        want, got = reference(*args), xla(*args)
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance
        )


@pytest.mark.parametrize("shape,dtype,backend", real_shapes())
def test_real_shapes(shape, dtype, backend):
    chunk, block = TILING.chunk, TILING.slots
    if ON_GPU and backend == "mosaic_gpu":
        tiles = mosaic_gpu.choose_tiles(shape.B, shape.S, shape.K, shape.H)
        chunk, block = tiles.chunk, tiles.block
    elif ON_GPU:
        tiling = triton.default_tiling(*shape[:6], jnp.dtype(dtype), shape.window)
        chunk, block = tiling.chunk, tiling.slots
    check_shape(make_attend(backend, shape), shape, dtype, chunk, block)


@pytest.mark.skipif(ON_GPU, reason="real shapes have both kinds there")
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_triton_needs_no_second_kernel_for_one_chunk(name):
    shape = CUT[name]
    check_shape(make_attend("triton, one chunk", shape), shape, jnp.float32, 160, 32)


def with_options() -> dict[str, BlockShape]:
    every = itertools.product([True, False], [None, 1, 20], [False, True], [None, 2.0])
    return {
        f"{causal}-{window}-{sinks}-{softcap}": SMALLEST._replace(
            causal=causal, window=window, sinks=sinks, softcap=softcap
        )
        # A third of them has every pair of options but one, for the interpreter's sake.
        for causal, window, sinks, softcap in list(every)[:: 1 if ON_GPU else 3]
    }


@pytest.mark.parametrize("shape,dtype,backend", cases(with_options(), jnp.float32))
def test_options_together(shape, dtype, backend):
    check_shape(make_attend(backend, shape), shape, dtype, TILING.chunk, TILING.slots)


@pytest.mark.parametrize("shape,dtype,backend", real_shapes())
def test_bits_do_not_depend_on_row_length_or_neighbours(shape, dtype, backend):
    check_bits(make_attend(backend, shape), shape, dtype)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape,dtype,backend", cases({"": SMALLEST}, jnp.bfloat16))
def test_a_row_that_sees_nothing_is_zero(shape, dtype, backend, sinks):
    # Capacity for one more sequence's worth of each reason: an empty one, a window all past it.
    shape = shape._replace(sinks=sinks, window=2, causal=False)
    q, k, v = inputs(shape, dtype)
    lengths, widths = np.array([0, 32]), np.array([0, 1])
    for name in (backend, "reference"):
        out = np.asarray(make_attend(name, shape)(q, k, v, lengths, widths), np.float32)
        assert np.isfinite(out).all()
        assert (out[0] == 0).all() and (out[1, 2:] == 0).all(), name
        assert (out[1, :2] != 0).any(axis=(1, 2)).all(), name


def mutants() -> dict:
    """Wrong kernels: a name, a shape, the part of `triton` that is replaced, and by what."""
    visible, combine, seen = triton._visible, triton.combine, triton._seen_by_any
    dot, load = triton._dot, triton.plt.load
    causal, window = SMALLEST, SMALLEST._replace(causal=False, window=20)
    return {
        "causal mask one late": (
            causal, "_visible", lambda maths, slot, at, end: visible(maths, slot, at + 1, end)
        ),
        "width one more": (
            causal, "_seen_by_any", lambda n, width, *rest: seen(n, width + 1, *rest)
        ),
        "window one more": (
            window, "_visible",
            lambda maths, *rest: visible(maths._replace(window=maths.window + 1), *rest),
        ),
        "no far end of the window": (
            window, "_visible",
            lambda maths, *rest: visible(maths._replace(causal=True), *rest),
        ),
        "no sinks": (
            causal._replace(sinks=True), "combine",
            lambda *rest, **how: combine(*rest[:5], None, *rest[6:], **how),
        ),
        "a rounded score": (
            causal, "_dot", lambda a, b, **how: dot(a, b, **how).astype(jnp.bfloat16) * 1.0
        ),
        "dead slots read": (
            causal, "plt",
            SimpleNamespace(
                load=lambda ref, mask, other: load(ref),
                store=triton.plt.store, dot=triton.plt.dot,
                CompilerParams=triton.plt.CompilerParams,
            ),
        ),
    }  # fmt: skip


@pytest.mark.skipif(ON_GPU, reason="a wrong kernel may read where it must not: interpreted only")
@pytest.mark.parametrize("name", mutants())
def test_a_wrong_kernel_is_caught(name, monkeypatch):
    shape, part, replacement = mutants()[name]
    monkeypatch.setattr(triton, part, replacement)
    # Not `make_attend`: that one is kept for the other tests.
    monkeypatch.setattr(triton, "_attend", triton._attend.__wrapped__)
    with pytest.raises(AssertionError):
        attend = make_attend.__wrapped__("triton", shape)
        check_shape(attend, shape, jnp.float32, TILING.chunk, TILING.slots)


def test_a_split_that_moves_with_the_length_is_caught():
    shape = CUT["qwen3"]

    def attend(q, k, v, lengths, widths):
        """Two halves of what is visible, combined: right, but cut relative to the length."""
        scores = jnp.einsum("btnh,bskh->btns", q, k) * shape.H**-0.5  # K is 1
        slot = jnp.arange(shape.S)[None, None, None]
        position = lengths[:, None, None, None] + jnp.arange(shape.T)[None, :, None, None]
        visible = (slot <= position) & (slot < (lengths + widths)[:, None, None, None])
        half, whole = lengths[:, None, None, None] // 2, []
        for seen in (visible & (slot < half), visible & (slot >= half)):
            weights = jnp.where(seen, jnp.exp(scores), 0)
            sums = jnp.einsum("btns,bskh->btnh", weights, v)
            whole.append((sums, weights.sum(-1, keepdims=True)))
        (sums, total), (more, rest) = whole
        return (sums + more) / (total + rest)

    q, k, v = inputs(shape)
    lengths, widths = edges(shape)
    want = make_attend("reference", shape)(q, k, v, lengths, widths)
    assert_close(attend(q, k, v, lengths, widths), want, jnp.float32)
    with pytest.raises(AssertionError):
        check_bits(jax.jit(attend), shape, jnp.float32)


@pytest.mark.parametrize("backend", sorted(PREFILL_BACKENDS))
@pytest.mark.parametrize("offset", [0, 1, 9, 24])
def test_prefill_is_bottom_right_causal(backend, offset):
    shape = (2, 16, 40, 4, 2, 16)
    q, k, v = inputs(shape)
    lengths, widths = jnp.full(2, offset), jnp.full(2, 16)
    got = prefill_attention(q, k, v, jnp.int32(offset), scale=0.25, backend=backend)
    np.testing.assert_allclose(got, by_hand(q, k, v, lengths, widths, True), atol=2e-6)


@pytest.mark.parametrize("op", [block_attention, prefill_attention])
def test_unknown_backend_is_refused_by_name(op):
    q, k, v = inputs(SHAPES[0])
    sizes = (jnp.zeros(1, int), jnp.ones(1, int)) if op is block_attention else (jnp.int32(0),)
    how = {"causal": True} if op is block_attention else {}
    with pytest.raises(ValueError, match="no backend 'cudnn'"):
        op(q, k, v, *sizes, **how, scale=1.0, backend="cudnn")


def device(platform, capability=None):
    return SimpleNamespace(platform=platform, compute_capability=capability)


CPU, SM75, SM80, SM89, SM90, SM100 = device("cpu"), *(
    device("gpu", capability) for capability in ("7.5", "8.0", "8.9", "9.0", "10.0")
)  # fmt: skip
QWEN3 = Sizes(width=16, groups=4, head_dim=128, dtype=jnp.bfloat16)


def test_default_backend_suits_the_device():
    chosen = [default_backend(d) for d in (CPU, SM75, SM80, SM89, SM90, SM100)]
    assert chosen == ["xla", "xla", "triton", "triton", "mosaic_gpu", "xla"]
    assert default_backend(device("gpu", "gfx942")) == "xla"
    assert default_backend(SM90, QWEN3) == "mosaic_gpu"
    assert default_backend(SM90, QWEN3._replace(dtype=jnp.float32)) == "triton"
    assert default_backend(SM90, QWEN3._replace(head_dim=96)) == "xla"
    for d in (CPU, SM75, SM80, SM89, SM90, SM100):
        check_backend(default_backend(d, QWEN3), QWEN3, d)
        for backend in ("xla", "reference"):
            check_backend(backend, QWEN3._replace(head_dim=96, dtype=jnp.float16), d)


@pytest.mark.parametrize(
    "backend,sizes,where,message",
    [
        ("mosaic_gpu", QWEN3, CPU, "capability 9.x, and this is a cpu device: use 'xla'"),
        ("mosaic_gpu", QWEN3, SM80, "capability 9.x, and this is sm80: use 'triton'"),
        ("mosaic_gpu", QWEN3, SM100, "this is sm100: use 'xla'"),
        ("triton", QWEN3, CPU, "8.0 or more, and this is a cpu device: use 'xla'"),
        ("triton", QWEN3, SM75, "this is sm75: use 'xla'"),
        ("mosaic_gpu", QWEN3._replace(dtype=jnp.float32), SM90, "not float32: use 'triton'"),
        ("triton", QWEN3._replace(dtype=jnp.float16), SM89, "not float16: use 'xla'"),
        ("triton", QWEN3._replace(head_dim=96), None, "64, 128, 256, not 96: use 'xla'"),
        ("triton", QWEN3._replace(width=33), None, "1 to 32 tokens, not 33: use 'xla'"),
        ("triton", QWEN3._replace(groups=17), None, "1 to 16 query heads a KV head, not 17"),
        ("cudnn", QWEN3, CPU, "no backend 'cudnn': use one of mosaic_gpu, triton, xla, reference"),
    ],
)
def test_a_backend_that_cannot_do_it_is_refused(backend, sizes, where, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        check_backend(backend, sizes, where)


def test_bad_options_are_refused():
    q, k, v = inputs(SMALLEST)
    at = (jnp.zeros(2, int), jnp.ones(2, int))
    how = {"causal": True, "scale": 1.0}
    with pytest.raises(ValueError, match="window is 0"):
        block_attention(q, k, v, *at, **how, window=0, backend="xla")
    with pytest.raises(ValueError, match="softcap is 0"):
        block_attention(q, k, v, *at, **how, softcap=0.0, backend="xla")
    with pytest.raises(ValueError, match="one dtype, not q float32, k bfloat16"):
        block_attention(q, k.astype(jnp.bfloat16), v, *at, **how, backend="triton")
    assert set(BACKENDS) == {"mosaic_gpu", "triton", "xla", "reference"}


@pytest.mark.skipif(ON_GPU, reason="needs the CPU to itself")
def test_nothing_is_interpreted_unasked():
    q, k, v = inputs(SMALLEST)
    at = (jnp.zeros(2, int), jnp.ones(2, int))
    with pytest.raises(ValueError, match="interpret"):
        block_attention(q, k, v, *at, causal=True, scale=1.0, backend="triton")


COMPILE = """
import json, jax, jax.numpy as jnp
from jflash.evals.compile_target import A100, H200, L4, compile_for
from pallas_kernels.block_attention import block_attention
from pallas_kernels.shapes import BLOCK_ATTENTION

spills_fail = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
for name, dtype, parts in [
    ("qwen3-b1-2k", jnp.bfloat16, (H200, A100, L4)),
    ("qwen3-b32-2k", jnp.bfloat16, (A100, L4)),
    ("gemma2-b1-8k-window", jnp.float32, (H200, L4)),
    ("corner-widest", jnp.bfloat16, (L4,)),
]:
    s = BLOCK_ATTENTION[name]
    cache = jax.ShapeDtypeStruct((s.B, s.S, s.K, s.H), dtype)
    number = jax.ShapeDtypeStruct((s.B,), jnp.int32)
    args = [jax.ShapeDtypeStruct((s.B, s.T, s.N, s.H), dtype), cache, cache, number, number]
    args += [jax.ShapeDtypeStruct((s.N,), jnp.float32)] * s.sinks
    attend = lambda q, k, v, lengths, widths, sinks=None: block_attention(
        q, k, v, lengths, widths, causal=s.causal, scale=0.1, window=s.window, sinks=sinks,
        softcap=s.softcap, backend="triton",
    )
    for part in parts:
        text = compile_for(part, attend, *args, options=spills_fail).as_text()
        kernels, fusions = text.count(" custom-call("), text.count(" fusion(")
        print(json.dumps([name, part.name, kernels, fusions]))
"""


@pytest.mark.skipif(ON_GPU, reason="there the kernels are compiled for the GPU that it has")
def test_triton_compiles_for_gpus_without_spills_or_a_third_kernel():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 8
    for name, part, kernels, fusions in compiled:
        # Where one chunk is enough the result needs no combining.
        assert (kernels, fusions) == (1 if name == "qwen3-b32-2k" else 2, 0), (name, part)
