"""Products in e4m3 against float64 sums of the rounded numbers, which numpy rounds by itself."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.matmul import float8_triton, gate_up, head_argmax, head_logits, matmul
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.rounded import rounded_weight

M, K, N = 19, 256, 128
TILE = Tile(rows=16, columns=32, depth=64)


def rounded(x: np.ndarray) -> np.ndarray:
    """Each row in e4m3, its largest number as 448."""
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(448)
    scales[scales == 0] = 1
    codes = (x / scales).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * scales


def case() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and a residual; rows and columns differ by orders of magnitude, and one is zero."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(M, K)) * 10.0 ** rng.integers(-3, 4, (M, 1))
    w = rng.normal(size=(K, N)) * 10.0 ** rng.integers(-3, 4, N)
    x[3], w[:, 5] = 0, 0
    return x.astype(np.float32), w.astype(np.float32), rng.normal(size=(M, N)).astype(np.float32)


def close(got: jax.Array, want: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """To float32's rounding of the sums' terms."""
    assert got.shape == want.shape
    assert (np.abs(np.asarray(got) - want) <= 1e-5 * (np.abs(x) @ np.abs(w)) + 1e-6).all()


def gated(sums: np.ndarray) -> np.ndarray:
    gate, up = np.split(sums, 2, axis=1)
    return gate / (1 + np.exp(-np.clip(gate, -700, None))) * up


def test_products_are_those_of_the_rounded_numbers():
    x, w, residual = case()
    made, rows = rounded_weight(jnp.asarray(w)), jnp.asarray(x)
    assert made.shape == w.shape and made.codes.dtype == jnp.float8_e4m3fn
    want = rounded(x) @ rounded(w.T).T
    close(matmul(rows, made, backend="cpu"), want, x, w)
    close(matmul(rows, made, jnp.asarray(residual), backend="xla"), want + residual, x, w)
    logits = head_logits(rows, made, backend="canonical")
    close(logits, want, x, w)
    np.testing.assert_array_equal(head_argmax(rows, made, backend="xla"), logits.argmax(axis=1))
    both = gate_up(rows[:3] / 1e3, made, backend="cpu")
    np.testing.assert_allclose(both, gated(want[:3] / 1e3), rtol=1e-2, atol=1e-4)


def test_the_triton_kernel_multiplies_rows_as_they_are():
    """Some rows of the last tile are no rows of x."""
    x, w, residual = case()
    made, rows = rounded_weight(jnp.asarray(w)), jnp.asarray(x)
    want = x @ rounded(w.T).T
    kernel = functools.partial(float8_triton.product, rows, made, tile=TILE, interpret=True)
    close(kernel(jnp.asarray(residual)), want + residual, x, w)
    np.testing.assert_allclose(kernel(halves=(0, N // 2)), gated(want), rtol=1e-3, atol=1e-2)
    best, ids = float8_triton.best_of_tiles(rows, made, tile=TILE, interpret=True)
    np.testing.assert_array_equal(ids[best.argmax(axis=0), np.arange(M)], want.argmax(axis=1))
