"""The kernel for tiles of any width, in Pallas's interpreter, which knows no inlined instructions.

So what a consumer multiplies is written here in jnp; the ring, the barriers, the chunks that are
copied, and where tiles begin are the kernel's own.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import canonical, reference, wide_mosaic
from pallas_kernels.matmul.canonical import by_tile
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.tiles import NARROWEST, Product, by_rule
from pallas_kernels.matmul.tuning import SMS, Tuning
from pallas_kernels.matmul.wide_mosaic import CHUNK, LEAST_RING, Wide, one_turn, product
from tests.kernels.test_canonical_matmul import bits, in_steps, interpreted


@pytest.fixture
def in_jnp(monkeypatch):
    launch = plgpu.kernel

    def added(sums, x, w, chunks):
        parts = w[...].reshape(len(sums), chunks, *w.shape[1:]).swapaxes(1, 2)
        wide = parts.reshape(len(sums), w.shape[1], chunks * CHUNK).astype(jnp.float32)
        rows, width = x[...].astype(jnp.float32), sums[0].shape[1]
        return tuple(s + jnp.dot(rows, own[:, :width]) for s, own in zip(sums, wide, strict=True))

    def store(ref, value):
        ref[...] = value

    def kernel(body, **how):
        return launch(body, interpret=plgpu.InterpretGPUParams(), **how)

    monkeypatch.setattr(plgpu, "kernel", kernel)
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    monkeypatch.setattr(wide_mosaic, "_added", added)
    monkeypatch.setattr(wide_mosaic, "_store", store)


@interpreted
@pytest.mark.parametrize("M", [65, 200])
@pytest.mark.parametrize(
    ("width", "firsts", "pieces"),
    [(72, None, 1), (136, (0, 200), 1), (40, (200, 0), 1), (72, None, 4)],
)
def test_products(in_jnp, M, width, firsts, pieces):
    x, w = in_steps(M, M, 256, 400)
    w = w * 2.0**-26 if firsts else w  # silu is no line
    got = product(x, w, tile=Wide(width=width, ring=3), halves=firsts, pieces=pieces)
    want = reference.canonical(x, w, pieces, 64)
    if firsts:
        gate, up = (want[:, i : i + 200] for i in firsts)
        want = canonical.silu_times(gate.astype(x.dtype), up.astype(x.dtype))
    if firsts is None:
        np.testing.assert_array_equal(bits(got), bits(want.astype(x.dtype)))
    else:
        got, want = (np.asarray(v, np.float32) for v in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-6 * np.abs(want).max())


@interpreted
def test_columns_that_are_no_whole_swizzles_have_the_bits_of_other_tiles(in_jnp):
    """As a fourth of Qwen3.5-27B's delta nets' inputs: 4,120 columns; so by few rows, and many."""
    x, w = in_steps(0, 300, 256, 408)
    tiles = [by_rule(Product.of("matmul", M, 256, 392, 1)) for M in (16, 100, 300)]
    assert [type(tile) for tile in tiles] == [Tile, Wide, Wide]
    whole, part = reference.canonical(x, w, 1, 64).astype(x.dtype), w[:, 8:400]
    for M, tile in zip((16, 100, 300), tiles, strict=True):
        product = Product.of("matmul", M, 256, 392, 1)
        got = by_tile(tile, product, x[:M], part, interpret=isinstance(tile, Tile))
        np.testing.assert_array_equal(bits(got), bits(whole[:M, 8:400]))


def test_a_tile_takes_one_turn_of_the_gpu():
    for K, columns, width in [(4096, 12288, 96), (2048, 6144, 48)]:
        tile = one_turn(K, columns, 2)
        assert tile is not None and tile.width == width and tile.ring >= LEAST_RING
        assert -(-columns // width) <= SMS
        rule = by_rule(Product.of("gate_up", 128, K, 2 * columns, 1))
        if width >= NARROWEST:
            assert rule == tile
        else:  # of 64 rows, and 96 of them in one turn
            assert isinstance(rule, Tuning) and (rule.block_m, rule.block_n) == (64, 256)
    assert one_turn(5120, 25600, 2) is None  # columns enough for several turns
    assert one_turn(576, 1536, 2) is None  # 16 of 64 columns read
    for wrong in (dict(width=60, ring=3), dict(width=64, ring=1)):
        with pytest.raises(ValueError, match="divides by 8"):
            Wide(**wrong)


def test_a_tile_whose_ring_would_have_three_slots_gives_way_to_turns_of_whole_swizzles(monkeypatch):
    gate_up, sizes = Product.of("gate_up", 128, 5120, 2 * 17408, 1), (5120, 17408, 2)
    assert one_turn(*sizes) is None
    by_turns = by_rule(gate_up)
    assert isinstance(by_turns, Tuning)
    assert (by_turns.block_m, by_turns.block_n, by_turns.block_k) == (64, 128, 64)
    monkeypatch.setattr(wide_mosaic, "LEAST_RING", 3)
    assert one_turn(*sizes) == by_rule(gate_up) == Wide(width=136, ring=3)


@interpreted
def test_a_residual_is_added_after_the_sum_was_rounded(in_jnp):
    """By what follows, with the bits of a kernel that adds it itself."""
    (x, w), residual = in_steps(0, 200, 256, 400), in_steps(1, 200, 256, 400)[0].repeat(2, axis=1)
    residual = residual[:, :400]
    product = Product.of("residual", 200, 256, 400, 2)
    got = by_tile(Wide(width=72, ring=3), product, x, w, residual, interpret=True)
    rounded = reference.canonical(x, w, 2, 64).astype(x.dtype).astype(jnp.float32)
    want = (residual.astype(jnp.float32) + rounded).astype(x.dtype)
    np.testing.assert_array_equal(bits(got), bits(want))
