"""The kernel for weights in fragments, in Pallas's interpreter.

That is its ring, its barriers, what it copies from where, pieces of K, and gate and up. Numbers are
whole, or halved, so that no sum is rounded.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul.kept import alone as kept_alone
from pallas_kernels.matmul.kept.fragments import fragments
from pallas_kernels.matmul.kept.mosaic import Kept, product
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised
from tests.support.kept_interpreter import interpreted as interpreted

K, N, F = 1024, 256, 128


@pytest.mark.parametrize(
    ("tile", "pieces", "halves"),
    [
        (Kept(stages=3), 1, None),
        (Kept(stages=8), 2, None),
        (Kept(stages=2, deep=2), 2, None),
        (Kept(stages=2, consumers=2), 1, (0, F)),
        (Kept(stages=3), 1, (F, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("M", [1, 12, pytest.param(20, marks=pytest.mark.long)])
def test_products(interpreted, M, tile, pieces, halves):
    rng = np.random.default_rng(M)
    codes = jnp.asarray(rng.integers(-8, 9, (K, N)), jnp.float8_e4m3fn)
    scales = jnp.asarray(2.0 ** rng.integers(-3, 0, (K // 128, N)), jnp.float32)
    w, x = Quantised(codes, scales, None, 128), jnp.asarray(rng.integers(-4, 5, (M, K)), "bfloat16")
    got = product(x, fragments(w), pieces=pieces, tile=tile, halves=halves)
    if halves:
        narrow = replace(w, scales=w.scales.astype(jnp.bfloat16))
        paired = [fragments(same, halves) for same in (w, narrow)]
        others = [product(x, same, pieces=1, tile=tile) for same in paired]
        taken = [(m, same) for m in (1, M) for same in paired if kept_alone.takes(same, m)]
        others += [kept_alone.gated(x[:m], same) for m, same in taken]
        for same in others:
            np.testing.assert_array_equal(np.asarray(same), np.asarray(got)[: len(same)])
    cuts = [slice(p * K // pieces, (p + 1) * K // pieces) for p in range(pieces)]
    array = np.asarray(dequantised(w, "float32"))
    want = np.stack([np.asarray(x, np.float32)[:, cut] @ array[cut] for cut in cuts])
    if halves:
        rounded = functools.partial(jnp.asarray, dtype="bfloat16")
        gate, up = (rounded(want[0][:, i : i + F]).astype(jnp.float32) for i in halves)
        want = jax.jit(lambda g, u: (g / (1 + jnp.exp(-g)) * u).astype("bfloat16"))(gate, up)
    elif pieces == 1:
        want = jnp.asarray(want[0], "bfloat16")
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
