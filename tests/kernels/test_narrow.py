"""Tiles for few columns: which products have them, and that their bits are those of other tiles."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul.canonical import by_tile
from pallas_kernels.matmul.few_columns import FewColumns
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.tiles import Product, by_rule
from pallas_kernels.matmul.tuning import Tuning, canonical_tuning
from pallas_kernels.matmul.wide_mosaic import Wide
from tests.kernels.test_canonical_matmul import bits, in_steps, interpreted

QKV, OUT, DOWN = ("matmul", 4096, 6144), ("matmul", 4096, 4096), ("residual", 12288, 4096)
GATE_UP = ("gate_up", 4096, 24576)


def tile_of(product: tuple[str, int, int], rows: int, devices: int) -> tuple[int, ...]:
    """Of a device's columns: rows and columns, the step over K, and what it shares out."""
    op, K, N = product
    P = pieces("gate_up" if op == "gate_up" else "matmul", K, N)
    tile = by_rule(Product.of(op, rows, K, N // devices, P))
    if isinstance(tile, Tile):
        return tile.columns, tile.depth, tile.stages, tile.warps
    if isinstance(tile, Wide | FewColumns):
        return dataclasses.astuple(tile)
    return tile.block_m, tile.block_n, tile.block_k, tile.walk, tile.split_k, tile.cluster_m


def test_a_devices_part_of_a_product_has_tiles_of_its_own():
    """Qwen3-8B's, by 1, 2 and 4 devices, as they were timed."""
    few = {
        QKV: ((64, 64, 6, 4), (64, 128, 6, 4), (32, 128, 8, 4)),
        OUT: ((64, 128, 5, 4), (32, 128, 8, 4), (16, 256, 4, 4)),
        GATE_UP: ((64, 64, 4, 4), (64, 128, 4, 8), (32, 64, 8, 4)),
        DOWN: ((64, 128, 5, 4), (32, 128, 8, 4), (16, 256, 4, 4)),
    }
    many = {
        QKV: ((128, 192, 64, 2, 1, 1), (64, 192, 64, 2, 1, 1), (64, 192, 64, 1, 2, 1)),
        OUT: ((128, 128, 64, 2, 1, 1), (64, 128, 64, 2, 1, 1), (64, 128, 64, 1, 2, 1)),
        GATE_UP: ((128, 256, 64, 1, 1, 2), (64, 256, 64, 1, 1, 1), (128, 192, 64, 1, 1, 2)),
        DOWN: ((128, 128, 64, 2, 1, 1), (64, 256, 64, 1, 2, 1), (128, 64, 64, 1, 2, 1)),
    }
    of_16 = {
        QKV: ((64, 64, 6, 4), (64, 256, 5, 4), (32, 128, 8, 4)),
        DOWN: ((64, 128, 5, 4), (32, 128, 8, 4), (10, 2)),
    }
    for rows, wanted in ((16, few | of_16), (64, few), (512, many)):
        found = {product: tuple(tile_of(product, rows, n) for n in (1, 2, 4)) for product in few}
        assert found == wanted, rows


def test_128_rows_of_few_columns_read_more_at_a_time_and_short_pieces_stay_together():
    assert tile_of(DOWN, 128, 4) == (64, 64, 128, 1, 2, 1)
    assert tile_of(GATE_UP, 128, 2) == (64, 256, 64, 1, 1, 1)
    smollm2 = Product.of("matmul", 512, 576, 960, 3)  # pieces of 192
    assert by_rule(smollm2) == canonical_tuning(*smollm2)
    ragged = Product.of("matmul", 16, 4096, 1000, 2)
    assert isinstance(by_rule(ragged), Tile) and by_rule(ragged).columns == 64


@interpreted
@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        *(("matmul", sizes) for sizes in ((64, 192, 2, 1, 1), (64, 192, 1, 2, 1))),
        *(("matmul", sizes) for sizes in ((64, 256, 1, 2, 1), (128, 64, 1, 2, 1))),
        *(("gate_up", sizes) for sizes in ((64, 256, 1, 1, 1), (128, 192, 1, 1, 2))),
    ],
)
def test_their_bits_are_those_of_few_rows(op, sizes):
    block_m, block_n, walk, split, cluster = sizes
    x, w = in_steps(1, 128 * cluster, 512, 768)
    w = w if op == "matmul" else w * 2.0**-26
    tuning = Tuning(
        block_m=block_m, block_n=block_n, block_k=64, stages=3, walk=walk, split_k=split,
        cluster_m=cluster,
    )  # fmt: skip
    P = walk * split
    by_many = by_tile(tuning, Product.of(op, len(x), 512, 768, P), x, w, interpret=True)
    few = Tile(rows=64, columns=64, depth=64)
    by_few = by_tile(few, Product.of(op, 64, 512, 768, P), x[:64], w, interpret=True)
    np.testing.assert_array_equal(bits(by_many)[:64], bits(by_few))
    other = by_tile(few, Product.of(op, 64, 512, 768, 3 - P), x[:64], w, interpret=True)
    assert op == "gate_up" or not np.array_equal(bits(by_few), bits(other))
    assert by_many.dtype == jnp.bfloat16
