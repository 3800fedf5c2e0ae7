"""The kernel for few columns of a long K: its ring and its pieces in Pallas's interpreter, which
has no registers, what it compiles to, and which products have it.

Numbers are whole, or halved, so that no sum is rounded.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import few_columns
from pallas_kernels.matmul.canonical import by_tile
from pallas_kernels.matmul.few_columns import FewColumns, product
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.tiles import Product, by_rule, candidates
from tests.support.described_gpu import H200, compile_for
from tests.support.kept_interpreter import store

K, N = 1024, 192


@pytest.fixture
def interpreted(monkeypatch):
    launch = plgpu.kernel
    how = {"interpret": plgpu.InterpretGPUParams()}
    monkeypatch.setattr(plgpu, "kernel", lambda *args, **given: launch(*args, **given, **how))
    monkeypatch.setattr(few_columns, "store", store)


@pytest.mark.parametrize(
    ("tile", "P"),
    [
        (FewColumns(slots=20, deep=1), 1),  # more slots than steps
        (FewColumns(slots=3, deep=2), 2),
        (FewColumns(slots=2, deep=4), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("M", [1, 12, 40])
def test_its_sums_are_those_of_each_piece(interpreted, M, tile, P):
    rng = np.random.default_rng(M)
    x = jnp.asarray(rng.integers(-4, 5, (M, K)), "bfloat16")
    w = jnp.asarray(rng.integers(-4, 5, (K, N)) / 2, "bfloat16")
    got = product(x, w, pieces=P, tile=tile)
    cuts = [slice(p * K // P, (p + 1) * K // P) for p in range(P)]
    want = np.stack(
        [np.asarray(x[:, cut], "float32") @ np.asarray(w[cut], "float32") for cut in cuts]
    )
    want = want if P > 1 else np.asarray(jnp.asarray(want[0], "bfloat16"))
    np.testing.assert_array_equal(np.asarray(got), want)
    assert got.dtype == (jnp.float32 if P > 1 else jnp.bfloat16)


def test_a_tile_that_divides_nothing_is_refused():
    x, w = jnp.zeros((16, 640), "bfloat16"), jnp.zeros((640, 64), "bfloat16")
    with pytest.raises(ValueError, match=r"neither 64 columns nor 1 pieces of 640"):
        product(x, w, pieces=1, tile=FewColumns(slots=2, deep=4))
    with pytest.raises(ValueError, match=r"neither 40 columns nor"):
        product(x, w[:, :40], pieces=1, tile=FewColumns(slots=2, deep=1))
    with pytest.raises(ValueError, match="two slots"):
        FewColumns(slots=1, deep=1)


def test_parts_of_few_columns_and_a_long_k_have_it():
    """A device's columns of Qwen3-8B's and 32B's products, by 1, 2 and 4 devices."""
    products = {
        "8b down": ("residual", 12288, 4096),
        "8b out": ("residual", 4096, 4096),
        "32b qkv": ("matmul", 5120, 10240),
        "32b out": ("pieces", 8192, 5120),
        "32b down": ("residual", 25600, 5120),
        "32b gate_up": ("gate_up", 5120, 51200),
    }
    fourths = {"8b down", "32b qkv", "32b out", "32b down"}  # of one of 4 devices
    for name, (op, length, columns) in products.items():
        P = pieces("gate_up" if op == "gate_up" else "matmul", length, columns)
        for rows in (1, 16, 32, 33):
            parts = [Product.of(op, rows, length, columns // n, P) for n in (1, 2, 4)]
            found = [by_rule(part) == FewColumns(slots=10, deep=2) for part in parts]
            assert found == [False, False, name in fourths and rows <= 32], (name, rows)
    by_one_program = Product.of("residual", 16, 25600, 1280, 1)
    assert isinstance(by_rule(by_one_program), Tile)  # it adds its residual itself
    down = Product.of("pieces", 16, 25600, 1280, 2)
    several = candidates(down)
    assert isinstance(several[0], FewColumns) and any(isinstance(tile, Tile) for tile in several)


def test_an_interpreter_takes_another_tile_in_its_place():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((16, K)), "bfloat16")
    w = jnp.asarray(rng.standard_normal((K, 64)), "bfloat16")
    part = Product.of("matmul", 16, K, 64, 2)
    few = Tile(rows=16, columns=32, depth=64)
    got = [by_tile(t, part, x, w, interpret=True) for t in (FewColumns(slots=2, deep=1), few)]
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(got[1]))


@pytest.mark.parametrize(
    ("rows", "length", "columns", "P"), [(1, 5120, 2560, 1), (32, 25600, 1280, 2)]
)
def test_it_compiles_for_a_described_gpu_as_one_kernel(rows, length, columns, P):
    tile = by_rule(Product.of("matmul", rows, length, columns, P))
    assert isinstance(tile, FewColumns)
    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, length), (length, columns)))
    compiled = compile_for(H200, lambda x, w: product(x, w, pieces=P, tile=tile), *shapes)
    text = compiled.as_text()
    assert text and text.count("custom-call(") == 1
