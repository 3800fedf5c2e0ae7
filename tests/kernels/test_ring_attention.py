"""Block attention against a ring: what a cache with a slot for every position gives, bit for bit.

Mosaic's and Triton's kernels run through their interpreters; on a GPU what is compiled runs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import block_attention, mosaic_gpu, reference, triton, xla
from tests.support.attention_checks import FULLY, ON_GPU, TILING, assert_same_bits

T, N, K, H, POSITIONS = 5, 4, 2, 64, 300
TILES = mosaic_gpu.Tiles(chunk=64, block=64, stages=1)


class Ring(NamedTuple):
    """A window in a ring of S slots; slots as few as can be, but for Mosaic's whole blocks."""

    S: int
    window: int
    causal: bool
    sinks: bool = False


RINGS = {
    "causal": Ring(S=40, window=36, causal=True),
    "two-sided": Ring(S=40, window=36, causal=False),
    "two-sided, narrower than the block": Ring(S=50, window=3, causal=False, sinks=True),
    "one": Ring(S=5, window=1, causal=True),
}
BLOCKS = {
    "causal": Ring(S=128, window=124, causal=True),
    "two-sided": Ring(S=128, window=60, causal=False, sinks=True),
}
# Where a ring of any of these sizes is empty, not full yet, at its seam, and far around.
LENGTHS = [0, 1, 38, 40, 77, 126, 131, 255]
WIDTHS = [T, 2, 1, T, 3]


def backends(dtype) -> dict:
    found = {"reference": reference.block_attention, "xla": xla.block_attention}
    interpreted = {} if ON_GPU else {"interpret": True}
    found["triton"] = functools.partial(triton.block_attention, tiling=TILING, **interpreted)
    if dtype == jnp.bfloat16:
        found["mosaic_gpu"] = functools.partial(
            mosaic_gpu.block_attention, tiles=TILES, **interpreted
        )
    return found


CASES = [
    pytest.param(ring, dtype, name, id=f"{of}-{jnp.dtype(dtype).name}-{name}")
    for rings, dtype in ((RINGS, jnp.float32), (BLOCKS, jnp.bfloat16))
    for of, ring in rings.items()
    for name in backends(dtype)
    if not (name == "mosaic_gpu" and ON_GPU and jax.devices()[0].compute_capability < "9")
]


def texts(B: int, dtype, seed: int):
    """Queries, keys and values at every position of B sequences."""
    random = np.random.default_rng(seed)
    shapes = (B, POSITIONS, N, H), (B, POSITIONS, K, H), (B, POSITIONS, K, H)
    return [np.array(jnp.asarray(random.normal(size=s), dtype)) for s in shapes]


def around(rows, ring: Ring, length: int, width: int):
    """The ring of a sequence that has written `length` + T positions; NaN where no row looks."""
    out = np.full((ring.S, *rows.shape[1:]), np.nan, rows.dtype)
    for position in range(max(0, length - ring.window + 1), length + width):
        out[position % ring.S] = rows[position]
    return out


def attend(name: str, ring: Ring, dtype, in_ring: bool):
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0]) if ring.sinks else None
    how = {"causal": ring.causal, "window": ring.window, "scale": H**-0.5, "sinks": sinks}
    op = functools.partial(backends(dtype)[name], ring=in_ring, **how)
    return jax.jit(op, compiler_options=FULLY if name == "xla" else {})


@pytest.mark.parametrize(("ring", "dtype", "name"), CASES)
def test_a_ring_is_a_full_cache_whatever_its_dead_slots_hold(ring, dtype, name):
    B = len(LENGTHS)
    lengths, widths = np.array(LENGTHS), np.resize(WIDTHS, B)
    q, k, v = texts(B, dtype, 0)
    block = np.stack([q[b, n : n + T] for b, n in enumerate(lengths)])
    rings = [
        np.stack(
            [around(x[b], ring, n, w) for b, (n, w) in enumerate(zip(lengths, widths, strict=True))]
        )
        for x in (k, v)
    ]
    got = attend(name, ring, dtype, True)(block, *rings, lengths, widths)
    exact = (np.asarray(x, np.float32) for x in (block, k, v))
    want = attend("reference", ring, jnp.float32, False)(*exact, lengths, widths)
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}[dtype]
    for b, width in enumerate(widths):  # the rest is padding
        np.testing.assert_allclose(
            np.asarray(got[b, :width], np.float32), want[b, :width], atol=tolerance, rtol=tolerance
        )
    assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.parametrize(("ring", "dtype", "name"), CASES)
def test_bits_do_not_depend_on_row_length_or_neighbours(ring, dtype, name):
    """One query against the same keys: whichever row it is of its block, beside whatever else."""
    op = attend(name, ring, dtype, True)
    query, keys, values = texts(1, dtype, 1)
    for position in (ring.S - 1, 2 * ring.S + 1):
        results = []
        for seed, row in enumerate([0, 1, T - 1]):
            q, k, v = texts(2, dtype, 10 + seed)
            length, b = position - row, seed % 2
            q[b, position] = query[0, position]
            k[b, : position + 1], v[b, : position + 1] = (
                keys[0, : position + 1], values[0, : position + 1],
            )  # fmt: skip
            # A causal query sees nothing after it; the other kind has to be its block's last.
            lengths, widths = np.array([7, 7]), np.array([T, T])
            lengths[b], widths[b] = length, T if ring.causal else row + 1
            block = np.stack([q[i, n : n + T] for i, n in enumerate(lengths)])
            rings = [
                np.stack([around(x[i], ring, lengths[i], widths[i]) for i in range(2)])
                for x in (k, v)
            ]
            results.append(np.asarray(op(block, *rings, lengths, widths)[b, row], np.float32))
        for other in results[1:]:
            assert_same_bits(other, results[0])


def test_a_ring_needs_a_window():
    q, k = jnp.zeros((1, T, N, H)), jnp.zeros((1, 64, K, H))
    at = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="needs a window"):
        block_attention(q, k, k, *at, causal=True, scale=1.0, backend="xla", ring=True)
