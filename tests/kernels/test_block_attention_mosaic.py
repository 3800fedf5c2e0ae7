"""The Mosaic GPU backend of block attention, run by its CPU interpreter: values and the bit law.

The interpreter runs the kernels' own bodies; it knows nothing of layouts, registers or races.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import mosaic_gpu, reference
from pallas_kernels.block_attention.mosaic_gpu import Tiles, block_attention, choose_tiles


def tiles(chunk, stages):
    return Tiles(chunk=chunk, block=64, stages=stages)


def operands(B, T, S, N, K, H, seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def run(q, k, v, lengths, widths, **how):
    """The kernel's result as float32, and the reference's for the same bfloat16 operands."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    lengths, widths = jnp.asarray(lengths, jnp.int32), jnp.asarray(widths, jnp.int32)
    how = {"scale": q.shape[-1] ** -0.5, "causal": True} | how
    cut = how.pop("tiles", None)
    got = block_attention(q, k, v, lengths, widths, **how, tiles=cut, interpret=True)
    # Operands as float32 for a result that is not rounded.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    sinks = how.pop("sinks", None)
    want = jax.jit(functools.partial(reference.block_attention, **how))
    return np.asarray(got, np.float32), np.asarray(want(q, k, v, lengths, widths, sinks=sinks))


SINKS = [0.5, -1.0, 2.0, 0.0, 1.0, -2.0, 3.0, 0.25]
CASES = {
    # name: (B, T, S, N, K, H), lengths, widths, chunk, stages, the rest
    "two chunks": ((1, 4, 128, 4, 1, 64), [70], [4], 64, 1, {}),
    "one chunk, two stages": ((1, 4, 128, 4, 1, 64), [70], [4], 128, 2, {}),
    "stages used again": ((1, 4, 256, 4, 2, 128), [250], [4], 256, 1, {}),
    "last chunk shorter": ((1, 4, 192, 2, 1, 64), [180], [4], 128, 2, {}),
    "empty and one": ((2, 4, 128, 2, 1, 64), [0, 1], [4, 1], 64, 1, {}),
    "nothing at all": ((2, 2, 128, 2, 1, 64), [0, 0], [0, 0], 64, 1, {}),
    "nothing, one chunk": ((1, 2, 128, 2, 1, 64), [0], [0], 128, 1, {}),
    "chunk edges": ((3, 4, 128, 2, 1, 64), [63, 64, 65], [1, 4, 3], 64, 1, {}),
    "block over a chunk edge": ((2, 4, 128, 2, 1, 64), [62, 61], [4, 3], 64, 1, {}),
    "full": ((2, 4, 128, 2, 1, 64), [124, 126], [4, 2], 64, 1, {}),
    "past capacity": ((2, 4, 128, 2, 1, 64), [126, 128], [4, 4], 64, 1, {}),
    "widest, one head a group": ((1, 32, 128, 2, 2, 64), [50], [31], 64, 1, {}),
    "bidirectional": ((2, 4, 128, 8, 2, 64), [63, 0], [3, 4], 64, 1, {"causal": False}),
    "window": ((2, 4, 192, 8, 2, 64), [150, 3], [4, 2], 64, 1, {"window": 20}),
    "window of one": ((1, 4, 128, 2, 1, 64), [63], [4], 64, 1, {"window": 1}),
    "window, one chunk": ((1, 4, 192, 2, 1, 64), [150], [4], 192, 2, {"window": 70}),
    "two-sided window": (
        (2, 4, 128, 8, 2, 64), [63, 90], [4, 3], 64, 1, {"window": 3, "causal": False},
    ),
    "sinks": ((2, 2, 128, 8, 2, 64), [63, 0], [2, 0], 64, 1, {"sinks": SINKS}),
    "sinks, one chunk": ((2, 2, 128, 8, 2, 64), [63, 0], [2, 0], 128, 2, {"sinks": SINKS}),
    "softcap": ((1, 4, 128, 4, 1, 64), [70], [4], 64, 1, {"softcap": 0.5}),
    "large softcap": ((1, 4, 128, 4, 1, 64), [70], [4], 64, 1, {"softcap": 50.0, "scale": 2.0}),
    "softcap, sinks, both ways": (
        (1, 4, 128, 8, 2, 64), [62], [3], 64, 1,
        {"softcap": 0.5, "sinks": SINKS, "causal": False},
    ),
    "one query": ((2, 1, 128, 8, 2, 64), [100, 5], [1, 1], 64, 1, {}),
    "two row tiles": ((1, 9, 128, 8, 1, 64), [100], [9], 64, 1, {}),
    "uneven row tiles": ((1, 5, 128, 16, 1, 64), [60], [5], 64, 1, {"window": 2}),
    "uneven row tiles, one chunk": ((1, 5, 128, 16, 1, 64), [60], [5], 128, 1, {}),
    "three heads a group": ((1, 5, 128, 3, 1, 64), [60], [5], 64, 1, {}),
    "24 heads a group": ((1, 5, 128, 24, 1, 64), [60], [5], 64, 1, {}),
    "32 heads a group, one chunk": ((1, 3, 128, 32, 1, 64), [60], [2], 128, 1, {}),
    "wide head": ((1, 2, 128, 2, 1, 256), [64], [2], 64, 1, {}),
    "ring, seam in the block": (
        (3, 4, 128, 2, 1, 64), [126, 383, 128], [4, 3, 1], 128, 2, {"window": 125, "ring": True},
    ),
    "two-sided ring": (
        (3, 4, 128, 8, 2, 64), [190, 256, 3], [4, 3, 4], 128, 1,
        {"window": 3, "causal": False, "ring": True, "sinks": SINKS},
    ),
    "wide head, one chunk": ((1, 2, 128, 2, 1, 256), [64], [2], 128, 1, {}),
    "widest head": ((1, 2, 128, 2, 1, 512), [64], [2], 64, 1, {"window": 60}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_whatever_unseen_slots_hold(name):
    sizes, lengths, widths, chunk, stages, how = CASES[name]
    q, k, v = operands(*sizes)
    for b, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        lowest = max(0, length - how.get("window", length + 1) + 1)
        seen = np.arange(lowest, length + width)
        dead = np.ones(k.shape[1], bool)
        dead[seen % len(dead) if "ring" in how else seen[seen < len(dead)]] = False
        for x, poison in ((k, np.nan), (v, np.inf)):
            x[b, dead] = poison
    if "sinks" in how:
        how = how | {"sinks": jnp.asarray(how["sinks"])}
    got, expected = run(q, k, v, lengths, widths, tiles=tiles(chunk, stages), **how)
    assert np.isfinite(got).all()
    for b, width in enumerate(widths):
        # Weights and result are rounded to bfloat16: 2⁻⁹ each of values up to about 3.
        np.testing.assert_allclose(got[b, :width], expected[b, :width], atol=1.5e-2, rtol=8e-3)
    if "nothing" in name:
        assert not got.any()


@pytest.mark.parametrize(
    ("window", "chunk"),
    [
        *((None, 64), (70, 128)),
        *(pytest.param(*x, marks=pytest.mark.long) for x in ((None, 128), (None, 256))),
        *(pytest.param(70, chunk, marks=pytest.mark.long) for chunk in (64, 256)),
    ],
)
def test_bits_depend_on_what_a_row_sees_alone(chunk, window):
    T, S, N, K, H = 6, 256, 4, 2, 64
    position = 129  # the row under test; its chunk or block begins within the verified block
    query, keys, values = operands(1, S, S, N, K, H)
    rows = []
    for seed, (row, slot) in enumerate([(0, 0), (1, 1), (5, 0), (3, 1)]):
        length = position - row
        q, k, v = operands(2, T, S, N, K, H, seed=10 + seed)  # junk neighbours and later rows
        k[slot, : position + 1], v[slot, : position + 1] = (
            keys[0, : position + 1],
            values[0, : position + 1],
        )
        k[slot, length + T :] = v[slot, length + T :] = np.nan
        q[slot, row] = query[0, position]
        lengths, widths = [7, 7], [T, T]
        lengths[slot], widths[slot] = length, T - seed % 2 if row < T - 1 else T
        got, _ = run(q, k, v, lengths, widths, tiles=tiles(chunk, 1), window=window)
        rows.append(got[slot, row])
    for other in rows[1:]:
        np.testing.assert_array_equal(rows[0], other)


def test_neither_width_nor_length_cuts_the_cache_otherwise():
    for B, S, K in [(1, 2048, 8), (8, 2048, 8), (32, 2048, 8), (1, 32768, 8), (1, 64, 1)]:
        cut = choose_tiles(B, S, K, 128)
        assert cut.chunk * -(-S // cut.chunk) >= S
        assert cut.shared_bytes(128) <= mosaic_gpu.SHARED_BYTES // 2
    assert choose_tiles(32, 2048, 8, 128).chunk == 2048


def test_refuses_what_it_cannot_do():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in operands(1, 2, 128, 2, 1, 64))
    at = jnp.asarray([3]), jnp.asarray([2])
    how = {"causal": True, "scale": 1.0}
    with pytest.raises(ValueError, match="float32"):
        block_attention(*(x.astype(jnp.float32) for x in (q, k, v)), *at, **how)
    with pytest.raises(ValueError, match="100 slots"):
        block_attention(q, k[:, :100], v[:, :100], *at, **how)
    with pytest.raises(ValueError, match="H=32"):
        block_attention(q[..., :32], k[..., :32], v[..., :32], *at, **how)
    with pytest.raises(ValueError, match="stages"):
        tiles(64, 2)
    with pytest.raises(ValueError, match="chunk is 96"):
        tiles(96, 1)
