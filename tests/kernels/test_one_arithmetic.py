"""The law of each operation alone, on a CPU: a row's bits are the same whatever lies beside it.

Every backend "cpu" at M = 1 … 512 rows, in part of a tile and in many; and for each a form that
breaks the law, which must be caught: a check that no fault fails would see no real one either.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.layers.rope import rope_angles
from jflash.records.specs import RopeConfig
from pallas_kernels import grouped_matmul, heads_to_cache, matmul, rms_norm
from pallas_kernels.block_attention import block_attention
from pallas_kernels.block_attention import cpu as attention_cpu
from pallas_kernels.grouped_matmul import canonical
from tests.support.attention_checks import ON_GPU

COMPILED_FULLY = True  # bits are compared, which may hang on what is fused with what
pytestmark = pytest.mark.skipif(ON_GPU, reason="these are the forms of a CPU")

ROWS = (1, 15, 16, 17, 512)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def draw(seed: int, *shape: int, dtype=jnp.float32):
    """By NumPy: JAX would compile a program for every shape, which takes longer than the op's."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def bits(x) -> np.ndarray:
    """As integers, so that 0 is not -0."""
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def broken(op, *rows, counts=ROWS) -> dict[int, int]:
    """At which M, and in how many rows, op(rows[:M]) is not the first M rows of all."""
    whole = bits(jax.jit(op)(*rows))
    found = {m: bits(jax.jit(op)(*(x[:m] for x in rows))) != whole[:m] for m in counts[:-1]}
    rows_of = {m: int(x.reshape(m, -1).any(axis=1).sum()) for m, x in found.items()}
    return {m: count for m, count in rows_of.items() if count}


# Products of the embedded pair, and one whose sizes nothing divides.
@pytest.mark.parametrize(
    ("K", "N", "dtype"),
    [(256, 512, "float32"), (640, 256, "bfloat16"), (41, 67, "float32"), (41, 67, "bfloat16")],
)
def test_products(K, N, dtype):
    x, w, residual = (draw(i, *s, dtype=dtype) for i, s in enumerate([(512, K), (K, N), (512, N)]))
    assert not broken(lambda x, r: matmul.matmul(x, w, r, backend="cpu"), x, residual)
    assert not broken(lambda x: matmul.partial_products(x, w, backend="cpu")[0], x)


@DTYPES
def test_gate_up_and_head(dtype):
    sizes = (512, 256), (256, 320), (999, 256)
    x, w, head = (draw(i, *size, dtype=dtype) for i, size in enumerate(sizes))
    assert not broken(lambda x: matmul.gate_up(x, w, backend="cpu"), x)
    assert not broken(lambda x: matmul.head_logits(x, head, backend="cpu"), x)
    best = jax.jit(lambda x: matmul.head_argmax(x, head, backend="cpu"))
    logits = jax.jit(lambda x: matmul.head_logits(x, head, backend="cpu"))(x)
    np.testing.assert_array_equal(best(x), np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(best(x[:1]), np.argmax(logits[:1], axis=-1))


def test_xlas_products_are_caught():
    x, w = draw(0, 512, 256), draw(1, 256, 512)
    assert broken(lambda x: matmul.matmul(x, w, backend="xla"), x)
    assert broken(lambda x: matmul.gate_up(x, w, backend="xla"), x)
    assert broken(lambda x: matmul.head_logits(x, w.T, backend="xla"), x)


def test_a_split_over_k_by_the_rows_is_caught():
    x, w = draw(0, 512, 256), draw(1, 256, 64)

    def split(x):
        pieces = 1 if len(x) >= 64 else 2  # the fault
        cut = x.reshape(len(x), pieces, -1), w.reshape(pieces, -1, 64)
        return sum(matmul.matmul(cut[0][:, i], cut[1][i], backend="cpu") for i in range(pieces))

    assert broken(split, x).keys() == {m for m in ROWS if m < 64}


@DTYPES
@pytest.mark.parametrize("D", [64, 576])
def test_norms(D, dtype):
    x, y, scale = draw(0, 512, D, dtype=dtype), draw(1, 512, D, dtype=dtype), draw(2, D)
    norm = lambda x: rms_norm.rms_norm(x, scale.astype(dtype), 1e-6, backend="cpu")  # noqa: E731
    assert not broken(norm, x)
    assert not broken(lambda x, y: norm(x + y), x, y)  # as a layer has it, after a residual


def test_xlas_norm_is_caught():
    x, scale = draw(0, 512, 64), draw(2, 64)
    assert broken(lambda x: rms_norm.rms_norm(x, scale, 1e-6, backend="xla"), x)


def heads_of(backend: str, dtype):
    heads = heads_to_cache.Heads(4, 2, 64, 1e-6, (0, 4 * 64, 6 * 64))
    scale = draw(5, 64, dtype=dtype)

    def op(x, angle):
        q, k, v = heads_to_cache.split_heads(
            x[None, None], scale, scale, jnp.cos(angle)[None], jnp.sin(angle)[None],
            heads=heads, dtype=dtype, backend=backend,
        )  # fmt: skip
        return jnp.concatenate([q, k, v], axis=2)[0]

    return op


@DTYPES
def test_heads(dtype):
    x, angle = draw(0, 512, 8 * 64, dtype=dtype), draw(1, 512, 32)
    assert not broken(heads_of("cpu", dtype), x, angle)


def test_xlas_heads_are_caught():
    assert broken(heads_of("xla", jnp.float32), draw(0, 512, 8 * 64), draw(1, 512, 32))


def test_angles_and_what_is_gated_after_a_bias():
    def angles(positions):
        return jnp.concatenate(
            rope_angles(positions[None], RopeConfig(theta=1e4, scaling=None), 64), axis=-1
        )[0]

    assert not broken(angles, 1000 + jnp.arange(512))
    x, bias = draw(0, 512, 61), draw(1, 61)
    gated = lambda x: matmul.silu_times(x + bias, x, backend="cpu")  # noqa: E731
    assert not broken(gated, x)


def experts_of(backend: str, dtype):
    """Rows of the first, third and last of four experts, as many of each as there are rows for."""
    gate_up, down = draw(1, 4, 64, 96, dtype=dtype), draw(2, 4, 48, 64, dtype=dtype)

    def op(x):
        third = len(x) // 3
        sizes = jnp.array([third, 0, len(x) - 2 * third, third])
        inner = grouped_matmul.grouped_gate_up(x, gate_up, sizes, backend=backend)
        return grouped_matmul.grouped_matmul(inner, down, sizes, backend=backend)

    return op


@DTYPES
def test_experts_products(dtype):
    """A row of the third expert: at another place, in another tile, beside other rows."""
    x, op = draw(0, 512, 64, dtype=dtype), jax.jit(experts_of("cpu", dtype))
    found = []
    for m in ROWS:
        place = m // 3
        found.append(bits(op(x[:m].at[place].set(x[0])))[place])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    sizes = jnp.array([100, 0, 230, 182])
    w = draw(1, 4, 64, 96, dtype=dtype)
    exact = [grouped_matmul.grouped_matmul(x, w, sizes, backend=b) for b in ("cpu", "reference")]
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in exact), atol=0.13, rtol=2e-2)


def routed(backend: str):
    def op(logits, outputs):
        weights = grouped_matmul.probabilities(logits, backend=backend)[:, :8]
        return grouped_matmul.weighted_sum(outputs, weights, backend=backend)

    return op


def test_clamped_gate():
    """Of products whose gates and ups go past the limit; a GPU's form too."""
    gate, up = draw(0, 512, 40) * 8, draw(1, 512, 40) * 8
    want = grouped_matmul.clamped_gate(gate, up, backend="reference")
    assert np.abs(np.asarray(up)).max() > 7 and np.asarray(gate).max() > 7
    g, u = np.minimum(np.asarray(gate, np.float64), 7), np.clip(np.asarray(up, np.float64), -7, 7)
    np.testing.assert_allclose(want, (u + 1) * g / (1 + np.exp(-1.702 * g)), rtol=2e-5, atol=1e-5)
    assert not broken(functools.partial(grouped_matmul.clamped_gate, backend="cpu"), gate, up)
    for got in (
        grouped_matmul.clamped_gate(gate, up, backend="cpu"),
        canonical.clamped(gate, up),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_router_and_the_sum_of_experts():
    logits, outputs = draw(0, 512, 60), draw(1, 512, 8, 32)
    assert not broken(functools.partial(grouped_matmul.sigmoids, backend="cpu"), logits)
    want = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    for got in (
        grouped_matmul.sigmoids(logits, backend="cpu"),
        grouped_matmul.sigmoids(logits, backend="xla"),
        canonical.sigmoids(logits, interpret=True),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert not broken(routed("cpu"), logits, outputs)
    assert broken(routed("xla"), logits, outputs)


N, K, H = 4, 2, 16
POSITIONS = 300


def seen_by_one(attend, dtype, **how):
    """One query at one position, in blocks of other widths, batches, capacities and rows."""
    query, keys, values = (
        np.asarray(draw(i, POSITIONS, n, H, dtype=dtype)) for i, n in enumerate((N, K, K))
    )
    found = []
    op = jax.jit(functools.partial(attend, scale=0.25, causal=True, **how))
    for position in (64, 197):
        results = []
        for B, T, S, row in ((1, 1, 320, 0), (1, 8, 512, 3), (3, 16, 320, 15), (2, 128, 512, 40)):
            q, k, v = (
                np.array(draw(9 + i, B, *s, H, dtype=dtype))
                for i, s in enumerate(((T, N), (S, K), (S, K)))
            )
            b, lengths = B - 1, np.full(B, 7, np.int32)
            q[b, row], lengths[b] = query[position], position - row
            k[b, : position + 1] = keys[: position + 1]
            v[b, : position + 1] = values[: position + 1]
            out = op(q, k, v, lengths, np.full(B, T, np.int32))
            results.append(bits(out)[b, row])
        found.append(all((other == results[0]).all() for other in results[1:]))
    return all(found)


def attend_cpu(*args, **how):
    return block_attention(*args, backend="cpu", **how)


@DTYPES
@pytest.mark.parametrize("how", [{}, {"window": 50}, {"softcap": 3.0}], ids=str)
def test_attention(dtype, how):
    assert seen_by_one(attend_cpu, dtype, **how)


def test_attention_by_xla_is_caught():
    assert not seen_by_one(lambda *a, **k: block_attention(*a, backend="xla", **k), jnp.float32)


def test_pieces_that_depend_on_the_batch_are_caught(monkeypatch):
    def faulty(q, *args, **how):
        with monkeypatch.context() as patch:
            patch.setattr(attention_cpu, "PIECE", 64 if len(q) == 1 else 32)
            return attend_cpu(q, *args, **how)

    assert not seen_by_one(faulty, jnp.float32)


def test_a_ring_is_the_cache_bit_for_bit():
    """Pieces go by positions: wherever a ring has them, in rings of any size, wrapped or not."""
    window, T = 70, 5
    how = {"scale": 0.25, "causal": False, "window": window}
    whole = jax.jit(functools.partial(attend_cpu, **how))
    wrapped = jax.jit(functools.partial(attend_cpu, ring=True, **how))
    k, v = draw(1, 1, 320, K, H), draw(2, 1, 320, K, H)
    for length in (3, 63, 130, 250):
        q = draw(length, 1, T, N, H)
        lengths, widths = jnp.array([length]), jnp.array([T])
        want = bits(whole(q, k, v, lengths, widths))
        for slots in (128, 192, 75):
            newest = length + T - 1
            place = newest - (newest - jnp.arange(slots)) % slots
            ring = [jnp.where((place >= 0)[:, None, None], x[:, place], jnp.nan) for x in (k, v)]
            np.testing.assert_array_equal(bits(wrapped(q, *ring, lengths, widths)), want)
