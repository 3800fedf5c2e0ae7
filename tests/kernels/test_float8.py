"""Products in e4m3 against float64 sums of the rounded numbers, which numpy rounds by itself."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import gate_up, head_argmax, head_confidence, head_logits, matmul
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.float8 import mosaic as float8_mosaic
from pallas_kernels.matmul.float8 import rounded_triton
from pallas_kernels.matmul.float8 import triton as float8_triton
from pallas_kernels.matmul.float8.rounded import Rounded, rounded_rows, rounded_weight

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
    ids, largest, sums = head_confidence(rows[:3] / 1e3, made, backend="canonical")
    np.testing.assert_array_equal(ids, logits[:3].argmax(axis=1))
    np.testing.assert_allclose(largest, logits[:3].max(axis=1) / 1e3, rtol=1e-4)
    all_sums = jnp.exp(logits[:3] / 1e3 - logits[:3].max(axis=1, keepdims=True) / 1e3).sum(axis=1)
    np.testing.assert_allclose(sums, all_sums, rtol=1e-4)
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


def test_a_kernel_rounds_rows_as_xla_does():
    rows = jnp.asarray(case()[0])[:, :200]
    made, want = rounded_triton.rounded_rows(rows, interpret=True), rounded_rows(rows)
    for got, expected in zip(made, want, strict=True):
        np.testing.assert_array_equal(got.view(jnp.uint8), expected.view(jnp.uint8))


def test_the_mosaic_kernel_multiplies_codes_by_codes(monkeypatch):
    """Two row tiles, the last of which ends early, and a last column tile that begins early."""
    launch = plgpu.kernel
    interpreted = functools.partial(launch, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(plgpu, "kernel", interpreted)
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    monkeypatch.setattr(float8_mosaic, "SMS", 6)
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(134, 384)) * 10.0 ** rng.integers(-3, 4, (134, 1))).astype(np.float32)
    w = (rng.normal(size=(384, 136)) * 10.0 ** rng.integers(-3, 4, 136)).astype(np.float32)
    rows, made = rounded_rows(jnp.asarray(x)), rounded_weight(jnp.asarray(w))
    plan = float8_mosaic.plan_for("product", *x.shape, 136, 4)
    assert (plan.row_groups, plan.columns * plan.half_n > 136) == (2, True)
    want = rounded(x) @ rounded(w.T).T
    close(float8_mosaic.product(rows, made, dtype=jnp.float32), want, x, w)
    gate, up = want[:, 68:], want[:, :68]
    both = float8_mosaic.product(rows, made, dtype=jnp.float32, halves=(68, 0))
    np.testing.assert_allclose(both, gated(np.hstack([gate, up])), rtol=1e-3, atol=1e-2)
    few = Rounded(rows.codes[:9], rows.scales[:9] / np.abs(want[:9]).max(axis=1))
    logits = want[:9] / np.abs(want[:9]).max(axis=1, keepdims=True)
    want = logits.argmax(axis=1), logits.max(axis=1)
    for found in float8_mosaic.confidence(few, made)[:2], float8_mosaic.largest(few, made):
        np.testing.assert_array_equal(found[0], want[0])
        np.testing.assert_allclose(found[1], want[1], rtol=1e-4)
    sums = float8_mosaic.confidence(few, made)[2]
    np.testing.assert_allclose(sums, np.exp(logits - want[1][:, None]).sum(axis=1), rtol=1e-4)
