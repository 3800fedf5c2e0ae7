"""Attention in the canonical form: one row, the same bits whoever computes which piece.

Through the interpreters, in pieces of 64 or 128 positions in place of 256. They multiply tiles in
an order of their own but of one shape, so a row keeps its place in a tile where bits are compared.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import (
    canonical,
    mosaic_gpu,
    mosaic_tails,
    pieces,
    reference,
)
from pallas_kernels.block_attention.mosaic_task import Task, Tiles
from tests.support.attention_checks import ON_GPU
from tests.support.described_gpu import H200, compile_for

interpreted = pytest.mark.skipif(
    ON_GPU, reason="beside a GPU the interpreter may wait for ever; there kernels run compiled"
)
WALK = Tiles(chunk=64, block=64, stages=1, walk=True, ordered=True)
SINKS = jnp.asarray([0.5, -1.0, 9.0, 0.0], jnp.float32)


def operands(B, T, S, N=4, K=2, H=64, seed=0, spread=4.0):
    """Scores far apart, so that later pieces shift the scale of those before them.

    And values that cancel: each of the first three eighths lies once more after them, negated, and
    the rest are 0. So for a row that sees them all what rounding left over is the result.
    """
    random = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    q, k, v = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes)
    half = 3 * S // 8
    k = k.at[:, half : 2 * half].set(k[:, :half])
    v = v.at[:, half : 2 * half].set(-v[:, :half]).at[:, 2 * half :].set(0)
    return q * spread, k, v


def attend(q, k, v, lengths, tiles, **how):
    lengths = jnp.asarray(lengths, jnp.int32)
    widths = jnp.full(lengths.shape, q.shape[1])
    how = {"scale": q.shape[-1] ** -0.5, "causal": True} | how
    got = mosaic_gpu.block_attention(
        q, k, v, lengths, widths, tiles=tiles, interpret=not ON_GPU, **how
    )
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return got, reference.block_attention(q, k, v, lengths, widths, **how)


HOW = {
    "plain": {},
    "window": {"window": 70},
    "sinks": {"sinks": SINKS},
    "softcap": {"softcap": 3.0},
    "both ways": {"causal": False},
}


@interpreted
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.long if x in ("window", "both ways") else ()) for x in HOW],
)
def test_a_walk_and_ctas_of_their_own_give_the_same_bits(name):
    q, k, v = operands(3, 4, 512)  # six blocks of 64 count: a tree of pieces adds otherwise
    lengths = [500, 126, 0]
    walked, want = attend(q, k, v, lengths, WALK, **HOW[name])
    split, _ = attend(q, k, v, lengths, dataclasses.replace(WALK, walk=False), **HOW[name])
    np.testing.assert_array_equal(walked, split)
    np.testing.assert_allclose(walked.astype(jnp.float32), want, atol=2e-2, rtol=1e-2)
    other = dataclasses.replace(WALK, chunk=128)
    if name == "plain":  # the inputs tell another cut apart
        assert (np.asarray(attend(q, k, v, lengths, other)[0]) != np.asarray(walked)).any()


@interpreted
@pytest.mark.parametrize("name", ["plain", "window"])
def test_strands_of_a_walk_give_the_same_bits(name):
    """Chunks of two blocks, so that a strand's blocks are no run; a strand has none to three."""
    q, k, v = operands(4, 4, 640)
    tiles = dataclasses.replace(WALK, chunk=128)
    lengths = [600, 400, 60, 0]
    one, want = attend(q, k, v, lengths, tiles, **HOW[name])
    two, _ = attend(q, k, v, lengths, dataclasses.replace(tiles, strands=2), **HOW[name])
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one.astype(jnp.float32), want, atol=2e-2, rtol=1e-2)


@interpreted
@pytest.mark.parametrize("name", ["plain", pytest.param("window", marks=pytest.mark.long)])
def test_ctas_that_take_several_pieces_have_the_same_bits(name):
    """Of eight pieces each of two CTAs takes four, or fewer where a window hides some."""
    q, k, v = operands(2, 4, 512)
    lengths, tiles = [500, 126], dataclasses.replace(WALK, walk=False)
    each, want = attend(q, k, v, lengths, tiles, **HOW[name])
    few, _ = attend(q, k, v, lengths, dataclasses.replace(tiles, ctas=8), **HOW[name])
    np.testing.assert_array_equal(few, each)
    np.testing.assert_allclose(few.astype(jnp.float32), want, atol=2e-2, rtol=1e-2)


def test_a_launch_does_not_grow_with_the_cache():
    """CUDA takes no more than 65,535 along an axis: 32 slots of 262,144 positions had 65,536."""
    sizes = [(B, T, heads) for B in (1, 8, 32) for T in (1, 16, 128) for heads in (1, 2, 8)]
    for (B, T, K), dims in itertools.product(sizes, (64, 128, 256, 512)):
        tiles = dataclasses.replace(WALK, walk=False, chunk=256)
        how = {"causal": True, "scale": 1.0, "window": None, "softcap": None, "ring": False}
        task = Task(B=B, T=T, S=2**18, K=K, G=8, H=dims, tiles=tiles, **how)
        _, turns, *_ = grid = task.grid["grid"]
        assert task.chunks == 1024 and math.prod(grid) < 1056 + math.prod(grid) / turns


def test_strands_without_a_walk_are_refused():
    with pytest.raises(ValueError, match="strands is 2: a walk has 1 or more, others 1"):
        dataclasses.replace(WALK, walk=False, strands=2)


@interpreted
@pytest.mark.parametrize(
    "name", ["plain", "sinks", pytest.param("softcap", marks=pytest.mark.long)]
)
def test_tails_of_long_texts_have_the_same_bits(name):
    """Of 12 pieces a walk takes 8, and CTAs of all texts the others."""
    q, k, v = operands(3, 4, 768, spread=1.0)
    lengths, tails = [760, 60, 0], dataclasses.replace(WALK, tails=8)
    walked, want = attend(q, k, v, lengths, WALK, **HOW[name])
    shared, _ = attend(q, k, v, lengths, tails, **HOW[name])
    np.testing.assert_array_equal(shared, walked)
    np.testing.assert_allclose(shared.astype(jnp.float32), want, atol=2e-2, rtol=1e-2)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no memory of other CTAs")
@pytest.mark.parametrize(("batch", "shares"), [(8, 2), (17, 1)])
@pytest.mark.parametrize("T", [1, 16])
def test_tails_at_real_sizes_have_the_same_bits(batch, shares, T):
    tiles = canonical.tiles_for(batch, T, 32, 8, 128)
    assert tiles.walk and tiles.tails and tiles.shares == shares
    q, k, v = operands(batch, T, 4096, N=32, K=8, H=128)
    lengths = [4000, 60, 2500, *[700] * (batch - 4), 0]
    walked, want = attend(q, k, v, lengths, dataclasses.replace(tiles, tails=0))
    shared, _ = attend(q, k, v, lengths, tiles)
    np.testing.assert_array_equal(shared, walked)
    np.testing.assert_allclose(shared.astype(jnp.float32), want, atol=2e-2, rtol=1e-2)


def plan_of(lengths: list[int], tails: int = 64) -> list[int]:
    tiles = dataclasses.replace(WALK, chunk=256, tails=tails)
    how = {"causal": True, "scale": 1.0, "window": None, "softcap": None, "ring": False}
    task = Task(B=len(lengths), T=16, S=2**15, K=8, G=4, H=128, tiles=tiles, **how)
    numbers = jnp.asarray(lengths), jnp.full(len(lengths), 16)
    return np.asarray(mosaic_tails.plan(task, *numbers)).tolist()


def test_who_has_a_tail():
    """Texts of more pieces than 8, and a quarter more than the median; walks are longer where tails
    have no room."""
    assert plan_of([100] * 4) == [8, *[0] * 10]
    assert plan_of([30000, 29000, 28000, 30000]) == [143, *[0] * 10]  # 114 pieces are the median's
    six, none = [100] * 6, [0] * 6
    tails = [0, 9, *[17] * 7, 41]  # of 17, 16, 1 and 32 pieces
    assert plan_of([4096, 4080, *six, 8000]) == [8, *tails, 3, 0, 1, 8, *none]
    assert plan_of([4096, *[4080] * 7, 8000]) == [20, *[0] * 9, 12, 1, 8, *none, 0, 0]
    one = [1, 0, *[0] * 7]
    assert plan_of([30000, *[100] * 7], 110) == [8, 0, *[110] * 8, *one]
    assert plan_of([30000, *[100] * 7], 109) == [16, 0, *[102] * 8, *one]
    assert plan_of([30000, 30000, 100, 100], 220) == [8, 0, 110, 220, 220, 220, 2, 0, 1, 0, 0]


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no memory of other CTAs")
@pytest.mark.parametrize("name", ["plain", "window", "both ways"])
@pytest.mark.parametrize("shares", [2, 4, 8])
def test_shares_of_a_walk_give_the_same_bits(name, shares):
    """Of 2,048 positions all take part once or more; of few, some take none."""
    tiles = Tiles(chunk=256, block=64, stages=2, walk=True, ordered=True)
    q, k, v = operands(6, 16, 2048, N=32, K=8, H=128)
    lengths = [2032, 1000, 700, 256, 255, 0]
    one, want = attend(q, k, v, lengths, tiles, **HOW[name])
    many, _ = attend(q, k, v, lengths, dataclasses.replace(tiles, shares=shares), **HOW[name])
    np.testing.assert_array_equal(one, many)
    np.testing.assert_allclose(one.astype(jnp.float32), want, atol=2e-2, rtol=1e-2)


@pytest.mark.skipif(ON_GPU, reason="a GPU is described to a process of CPUs alone")
def test_a_walk_of_two_shares_compiles_and_is_one_kernel():
    tiles = canonical.tiles_for(8, 16, 32, 8, 128)
    assert tiles.shares == 2
    q, cache = jax.ShapeDtypeStruct((8, 16, 32, 128), jnp.bfloat16), (256, 64, 8, 128)
    pages, numbers = (jax.ShapeDtypeStruct(cache, jnp.bfloat16),) * 2, jnp.zeros(8, jnp.int32)
    how = {"causal": True, "scale": 0.1, "table": jnp.zeros((8, 32), jnp.int32)}
    attention = functools.partial(canonical.block_attention, **how)
    text = compile_for(H200, attention, q, *pages, numbers, numbers).as_text()
    assert text.count(" custom-call(") == 1  # no second kernel


def test_shares_that_cannot_be_are_refused():
    for other in ({"shares": 3}, {"shares": 2, "strands": 2}, {"shares": 2, "walk": False}):
        with pytest.raises(ValueError, match="a walk of one strand has 1, 2, 4 or 8"):
            dataclasses.replace(WALK, **other)
    q, k, v = operands(1, 4, 64, N=6)
    with pytest.raises(ValueError, match="192 bytes a query: not a multiple of 128"):
        attend(q, k, v, [50], dataclasses.replace(WALK, shares=2))


@interpreted
def test_more_chunks_than_are_loaded_at_once():
    q, k, v = operands(1, 2, 640)  # ten pieces
    walked, want = attend(q, k, v, [630], WALK)
    split, _ = attend(q, k, v, [630], dataclasses.replace(WALK, walk=False))
    np.testing.assert_array_equal(walked, split)
    np.testing.assert_allclose(walked.astype(jnp.float32), want, atol=2e-2, rtol=1e-2)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter waits for ever with two tiles of rows")
def test_a_row_does_not_depend_on_batch_capacity_width_or_stages():
    q, k, v = operands(3, 40, 256, seed=1)  # two tiles of rows
    whole, _ = attend(q, k, v, [200, 130, 60], WALK)
    alone, _ = attend(q[1:2, :3], k[1:2], v[1:2], [130], dataclasses.replace(WALK, walk=False))
    np.testing.assert_array_equal(alone[0], whole[1, :3])
    # Another capacity, whose unseen slots hold NaN; and the second tile's rows as a block.
    more = ((0, 0), (0, 64), (0, 0), (0, 0))
    longer_k, longer_v = (jnp.pad(x, more, constant_values=jnp.nan) for x in (k, v))
    wide, _ = attend(q, longer_k, longer_v, [200, 130, 60], dataclasses.replace(WALK, walk=False))
    np.testing.assert_array_equal(wide, whole)
    later, _ = attend(q[:, 32:], k, v, [232, 162, 92], WALK)
    np.testing.assert_array_equal(later, whole[:, 32:])
    two = Tiles(chunk=128, block=64, stages=2, walk=True, ordered=True)
    one = dataclasses.replace(two, stages=1)
    for tiles in (two, dataclasses.replace(two, walk=False)):
        got, _ = attend(q, k, v, [200, 130, 60], tiles)
        np.testing.assert_array_equal(got, attend(q, k, v, [200, 130, 60], one)[0])


@interpreted
def test_a_cut_that_depends_on_the_batch_is_caught():
    """The planted violation: `choose_tiles` cuts by the batch and the capacity."""
    q, k, v = operands(8, 4, 512, K=4, seed=2)
    lengths = [500] * 8
    cuts = [mosaic_gpu.choose_tiles(B, 512, 64, 64) for B in (1, 8)]
    assert cuts[0].chunk != cuts[1].chunk
    many, _ = attend(q, k, v, lengths, cuts[1])
    one, _ = attend(q[:1], k[:1], v[:1], lengths[:1], cuts[0])
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(one[0], many[0])


def test_scaling_by_powers_of_two_is_exact_and_skips_what_is_not_seen():
    across = lambda number, like: jnp.broadcast_to(number, like.shape)  # noqa: E731
    sums = jnp.asarray([1.5, -3.25, 1e-30], jnp.float32)
    piece = sums, jnp.float32(7), jnp.float32(2.5)
    unseen = jnp.zeros(3), jnp.float32(pieces.LOWEST), jnp.float32(0)
    for merged in (pieces.merge(piece, unseen, across), pieces.merge(unseen, piece, across)):
        for got, want in zip(merged, piece, strict=True):
            np.testing.assert_array_equal(got, want)
    merged = pieces.merge(piece, (sums, jnp.float32(4), jnp.float32(1)), across)
    np.testing.assert_array_equal(merged[0], sums + sums * 0.125)
    assert (merged[1], merged[2]) == (7, 2.625)
    nothing = pieces.finish(unseen, None, across)
    np.testing.assert_array_equal(nothing, jnp.zeros(3))


def test_the_cut_is_one_constant():
    for B, T, N, K, H in [(1, 1, 32, 8, 128), (8, 16, 32, 8, 128), (1, 512, 64, 8, 64)]:
        tiles = canonical.tiles_for(B, T, N, K, H)
        assert tiles.chunk == pieces.PIECE and tiles.block == 64 and tiles.ordered
        assert tiles.shared_bytes(H) <= mosaic_gpu.SHARED_BYTES // (
            1 if max(tiles.strands, tiles.shares) > 1 else 2
        )
    assert not canonical.tiles_for(1, 16, 32, 8, 128).walk
    assert canonical.tiles_for(8, 16, 32, 8, 128).walk
    strands = {b: canonical.tiles_for(b, 16, 9, 3, 64).strands for b in (1, 22, 32, 33)}
    assert strands == {1: 1, 22: 2, 32: 2, 33: 1}
    shares = {b: canonical.tiles_for(b, 16, 32, 8, 128).shares for b in (1, 4, 8, 9, 32)}
    assert shares == {1: 1, 4: 1, 8: 2, 9: 1, 32: 1}
    assert canonical.tiles_for(8, 16, 32, 8, 128).strands == 1
    assert canonical.tiles_for(1, 512, 32, 8, 128).walk  # a prompt's chunk
    wide = {(b, t): canonical.tiles_for(b, t, 16, 2, 256).walk for b in (1, 32) for t in (16, 512)}
    assert wide == {(1, 16): False, (1, 512): True, (32, 16): True, (32, 512): True}
    windows = [canonical.tiles_for(32, 16, 16, 8, 256, window).walk for window in (1024, 2**15)]
    assert windows == [True, False] and not canonical.tiles_for(8, 16, 16, 8, 256, 1024).walk
