"""Block attention: every backend against the float32 reference, and the contract's promises.

Mosaic's kernel has a file of its own on a CPU.
"""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import (
    block_attention,
    mosaic_gpu,
    triton,
)
from pallas_kernels.shapes import BLOCK_ATTENTION, BlockShape
from tests.support.attention_checks import (
    CUT,
    ON_GPU,
    SHAPES,
    SMALLEST,
    TILING,
    assert_close,
    by_hand,
    can_run,
    check_bits,
    check_shape,
    edges,
    inputs,
    make_attend,
)

# In float32 only: groups that are no power of two, the widest block, the narrowest.
CUT_32 = {
    "qwen2.5-7b": BlockShape(B=2, T=5, S=100, N=14, K=2, H=64, context=60),
    "widest": BlockShape(B=1, T=32, S=96, N=8, K=1, H=64, context=50),
    "narrowest": BlockShape(B=3, T=1, S=70, N=2, K=2, H=64, context=40, causal=False, window=9),
}


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
    # The interpreter knows no dtype's own instructions: one shape in bfloat16, the others if asked.
    one = {"gpt-oss": CUT["gpt-oss"]}
    others = {name: shape for name, shape in CUT.items() if name not in one}
    rounded = cases(others, jnp.bfloat16)
    long = [pytest.param(*x.values, id=x.id, marks=pytest.mark.long) for x in rounded]
    return cases(CUT | CUT_32, jnp.float32) + cases(one, jnp.bfloat16) + long


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_contract(shape, causal):
    q, k, v = inputs(shape)
    lengths, widths = edges(shape)
    sinks = jax.random.normal(jax.random.key(3), (shape[3],))
    for window, sink, softcap in [(None, None, None), (3, None, None), (5, sinks, 1.5)]:
        how = {"causal": causal, "window": window, "sinks": sink, "softcap": softcap}
        attend = functools.partial(block_attention, scale=shape[-1] ** -0.5, backend="reference")
        attend = jax.jit(functools.partial(attend, **how))
        got = attend(q, k, v, lengths, widths)
        np.testing.assert_allclose(got, by_hand(q, k, v, lengths, widths, **how), atol=2e-6)


@pytest.mark.parametrize("dtype,tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_xla_takes_any_sizes(shape, causal, dtype, tolerance):
    q, k, v = inputs(shape, dtype)
    how = {"causal": causal, "scale": shape[-1] ** -0.5}
    reference, xla = (
        jax.jit(functools.partial(block_attention, **how, backend=name))
        for name in ("reference", "xla")
    )
    for lengths, widths in [edges(shape), tuple(x[::-1] for x in edges(shape))]:
        args = (q, k, v, lengths, widths)
        want, got = reference(*args), xla(*args)
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance
        )


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("offset", [0, 1, 9, 24])
def test_a_prompt_chunk_is_a_causal_block_that_fills_its_width(backend, offset):
    q, k, v = inputs((2, 16, 40, 4, 2, 16))
    lengths, widths = jnp.full(2, offset), jnp.full(2, 16)
    got = block_attention(q, k, v, lengths, widths, causal=True, scale=0.25, backend=backend)
    np.testing.assert_allclose(got, by_hand(q, k, v, lengths, widths, True), atol=2e-6)


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


# Mosaic's kernel takes bfloat16 alone.
@pytest.mark.parametrize(
    "shape,dtype,backend", cases(with_options(), jnp.float32, *[jnp.bfloat16] * ON_GPU)
)
def test_options_together(shape, dtype, backend):
    check_shape(make_attend(backend, shape), shape, dtype, TILING.chunk, TILING.slots)


def in_one_dtype() -> list:
    """The interpreter knows no dtype's own instructions."""
    return real_shapes() if ON_GPU else cases(CUT, jnp.bfloat16) + cases(CUT_32, jnp.float32)


@pytest.mark.parametrize("shape,dtype,backend", in_one_dtype())
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
        einsum = functools.partial(jnp.einsum, precision="highest")
        scores = einsum("btnh,bskh->btns", q, k) * shape.H**-0.5  # K is 1
        slot = jnp.arange(shape.S)[None, None, None]
        position = lengths[:, None, None, None] + jnp.arange(shape.T)[None, :, None, None]
        visible = (slot <= position) & (slot < (lengths + widths)[:, None, None, None])
        half, whole = lengths[:, None, None, None] // 2, []
        for seen in (visible & (slot < half), visible & (slot >= half)):
            weights = jnp.where(seen, jnp.exp(scores), 0)
            sums = einsum("btns,bskh->btnh", weights, v)
            whole.append((sums, weights.sum(-1, keepdims=True)))
        (sums, total), (more, rest) = whole
        return (sums + more) / (total + rest)

    q, k, v = inputs(shape)
    lengths, widths = edges(shape)
    want = make_attend("reference", shape)(q, k, v, lengths, widths)
    assert_close(attend(q, k, v, lengths, widths), want, jnp.float32)
    with pytest.raises(AssertionError):
        check_bits(jax.jit(attend), shape, jnp.float32)
