"""The grouped GEMMs: every backend against the float32 reference, and the contract's promises.

Without a GPU the Triton kernel runs through Pallas' interpreter: its tiles and masks are the
device's own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_gate_up, grouped_matmul, probabilities, triton
from pallas_kernels.shapes import GROUPED_MATMUL as REAL
from tests.support.attention_checks import ON_GPU
from tests.support.row_checks import cancelling, halves, result_of

OPS = {"grouped_matmul": grouped_matmul, "grouped_gate_up": grouped_gate_up}
SIZES = [[0, 17, 3, 0, 20, 0], [40, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 40], [7, 7, 7, 7, 6, 6]]
K, N = 128, 128


def draw(seed, *shape, dtype=jnp.bfloat16, scale=1.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def on_backend(op: str, backend: str):
    """The op by one backend; the GPU's kernel through the interpreter where there is none."""
    if backend == "triton":
        return functools.partial(getattr(triton, op), interpret=not ON_GPU)
    return functools.partial(OPS[op], backend=backend)


def close(got, want, atol=8e-3):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    scale = np.abs(want).max()
    np.testing.assert_allclose(got / scale, want / scale, atol=atol)


def test_reference_is_the_contract():
    """By float64 products, one expert's rows after the other's."""
    x, w, sizes = draw(0, 40, 24), draw(1, 6, 24, 12, scale=0.2), SIZES[0]
    wide_x, wide_w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    ends = np.cumsum(sizes)
    parts = [
        wide_x[e - n : e] @ wide_w[i] for i, (e, n) in enumerate(zip(ends, sizes, strict=True))
    ]
    product = np.asarray(jnp.asarray(np.concatenate(parts), jnp.bfloat16), np.float64)
    close(grouped_matmul(x, w, jnp.array(sizes), backend="reference"), product)
    gate, up = np.split(product, 2, axis=1)
    want = gate / (1 + np.exp(-gate)) * up
    close(grouped_gate_up(x, w, jnp.array(sizes), backend="reference"), want)
    want = up / (1 + np.exp(-up)) * gate
    close(grouped_gate_up(x, w, jnp.array(sizes), (6, 0), backend="reference"), want)


@pytest.mark.parametrize("columns", [96, 48])
@pytest.mark.parametrize("op", OPS)
def test_a_devices_columns_have_the_bits_of_the_whole_weights(op, columns):
    """In narrower tiles: 64 columns do not divide a part of gpt-oss's or Gemma 4's experts."""
    x, w, sizes = draw(0, 40, K), draw(1, 6, K, 2 * N, scale=0.2), jnp.array(SIZES[0])
    run = on_backend(op, "triton")
    assert triton.width_of(columns) < triton.width_of(N)
    if op == "grouped_matmul":
        whole, part = run(x, w, sizes), run(x, w[:, :, 64 : 64 + columns], sizes)
        np.testing.assert_array_equal(part, whole[:, 64 : 64 + columns])
        return
    both = [w[:, :, first : first + columns] for first in (0, N)]
    whole, part = run(x, w, sizes), run(x, jnp.concatenate(both, axis=2), sizes)
    np.testing.assert_array_equal(part, whole[:, :columns])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_backends_equal_the_reference(op, sizes):
    x, w, sizes = draw(0, 40, K), draw(1, 6, K, N, scale=0.1), jnp.array(sizes)
    # The halves in the other order: the usual one has 0 first.
    turned = {"firsts": (N // 2, 0)} if op == "grouped_gate_up" else {}
    want = OPS[op](x, w, sizes, **turned, backend="reference")
    for backend in ("xla", "triton"):
        close(on_backend(op, backend)(x, w, sizes, **turned), want)
    wide = [v.astype(jnp.float32) for v in (x, w)]
    want = OPS[op](*wide, sizes, backend="reference")
    close(OPS[op](*wide, sizes, backend="xla"), want, atol=4e-6)


def bits_cases() -> list:
    """op, backend, dtype, R, E, K, N: on a GPU those of real models."""
    if not ON_GPU:
        dtypes = {"xla": jnp.float32, "triton": jnp.bfloat16}
        return [(op, name, dtype, 40, 6, K, N) for op in OPS for name, dtype in dtypes.items()]
    return [(s.op, "canonical", jnp.bfloat16, s.M * s.k, s.E, s.K, s.N) for s in REAL.values()]


def routings(R: int, E: int) -> list:
    """Rows of every expert: as in SIZES, or the middle one with all, then most, then few."""
    if sum(SIZES[0]) == R:
        return SIZES
    most = np.bincount(np.arange(R // 4) % E, minlength=E)
    most[E // 2] += R - R // 4
    few = np.bincount((E // 2 + np.arange(R)) % E, minlength=E)
    return [np.eye(E, dtype=int)[E // 2] * R, most, few]


@pytest.mark.parametrize("op,backend,dtype,R,E,K,N", bits_cases())
def test_a_rows_bits_are_its_own(op, backend, dtype, R, E, K, N):
    """The same row at every place, for the same expert, among rows that are many or few."""
    run, (w, probe) = jax.jit(on_backend(op, backend)), cancelling(E, K, N, dtype=dtype)
    seen = set()
    for seed, sizes in enumerate(routings(R, E)):
        owner = np.repeat(np.arange(E), sizes)
        for expert in np.flatnonzero(sizes) if E < 10 else [E // 2]:
            for own in halves(owner == expert):
                out = result_of(lambda x, n=sizes: run(x, w, jnp.array(n)), probe, own, seed)
                seen.add((int(expert), np.asarray(out, np.float32).tobytes()))
    assert len(seen) == (E if E < 10 else 1)  # one result an expert


@pytest.mark.skipif(ON_GPU, reason="on a GPU the test above has as many rows of real models")
@pytest.mark.parametrize("op", OPS)
def test_a_row_among_512_has_the_bits_that_it_has_alone(op):
    """Of the second expert, whose tiles begin inside the first one's; and a fault is seen."""
    run, (w, probe) = on_backend(op, "triton"), cancelling(2, K, N)
    alone = run(probe[None], w, jnp.array([0, 1]))[0]
    many, sizes = draw(3, 512, K).at[300].set(probe), jnp.array([200, 312])
    assert (alone != 0).any()
    np.testing.assert_array_equal(run(many, w, sizes)[300], alone)
    turned = run(many[:, ::-1], w[:, ::-1], sizes)[300]  # K is summed from its other end
    assert (turned != alone).any()


@pytest.mark.parametrize("block", [16, 32])
def test_tiles_hold_every_row_once_and_one_expert_each(block):
    rng = np.random.default_rng(0)
    for sizes in [*SIZES, *(rng.multinomial(40, p) for p in rng.dirichlet([0.3] * 6, 20))]:
        tiles = triton.tiles_of(jnp.array(sizes), 40, block)
        assert len(tiles.expert) == 40 // block + 6
        owner = np.repeat(np.arange(6), sizes)
        held = []
        for expert, members in zip(tiles.expert, np.asarray(tiles.members), strict=True):
            own = members[members >= 0]
            assert (np.diff(own) == 1).all() and (owner[own] == expert).all()
            held += own.tolist()
        assert sorted(held) == list(range(40))


def test_refusals():
    x, w, sizes = draw(0, 40, K), draw(1, 6, K, 24), jnp.array(SIZES[0])
    with pytest.raises(ValueError, match="24 columns: use the backend 'xla'"):
        grouped_matmul(x, w, sizes, backend="triton")
    with pytest.raises(ValueError, match="float32"):
        grouped_gate_up(x.astype(jnp.float32), w.astype(jnp.float32), sizes, backend="triton")
    with pytest.raises(ValueError, match="have this in route"):  # no other form beside it
        probabilities(x, backend="canonical")
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        grouped_matmul(x, w, sizes, backend="cuda")
