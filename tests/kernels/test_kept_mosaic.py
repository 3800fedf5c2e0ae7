"""The kernel for weights in fragments, in Pallas's interpreter, which knows no registers.

So what threads do in registers is written here in jnp: the conversion, the first operand of wgmma
(the interpreter's lies in shared memory) and the turned result. The rest is the kernel's own: its
ring, its barriers, what it copies from where, pieces of K, and gate and up. Numbers are whole, or
halved, so that no sum is rounded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import kept_mosaic
from pallas_kernels.matmul.fragments import COLUMNS, DEPTH, Fragments, fragments
from pallas_kernels.matmul.kept_mosaic import Kept, product
from pallas_kernels.matmul.mosaic_kernel import tiled
from pallas_kernels.matmul.quantised import Quantised, dequantised

K, N, F = 1024, 256, 128


def converted(ref, w: Fragments):
    """As `kept_mosaic._converted`, of FP8 in one group a tile; thread, word, half, pair."""
    words = ref[...]
    mine = words[: w.code_rows].reshape(4, 128, 4).swapaxes(0, 1).reshape(4, 8, 4, 16, 1, 1)
    shifts = 16 * jnp.arange(2)[:, None] + 8 * jnp.arange(2)
    codes = (mine >> shifts.astype(jnp.uint32) & 255).astype(jnp.uint8)
    numbers = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    numbers = numbers.transpose(0, 4, 1, 3, 2, 5).reshape(COLUMNS, DEPTH)
    scales = lax.bitcast_convert_type(words[w.code_rows], jnp.float32)
    return (numbers * scales[:, None]).astype(jnp.bfloat16)


def store(ref, value):
    ref[...] = value.T


@pytest.fixture
def interpreted(monkeypatch):
    launch, wgmma, own = plgpu.kernel, plgpu.wgmma, []

    def kernel(body, *, scratch_types, num_threads, **how):
        first = plgpu.SMEM((num_threads, COLUMNS, DEPTH), jnp.bfloat16, transforms=tiled(128, 2))

        def with_first(*refs, first, **named):
            own.append(first)
            body(*refs, **named)

        how |= {"num_threads": num_threads, "interpret": plgpu.InterpretGPUParams()}
        return launch(with_first, scratch_types={**scratch_types, "first": first}, **how)

    def multiply(acc, numbers, rows):
        mine = own[-1].at[lax.axis_index("wg")]
        mine[...] = numbers
        plgpu.commit_smem()
        wgmma(acc, mine, rows)
        plgpu.wgmma_wait(0)  # the next numbers lie where these do

    monkeypatch.setattr(plgpu, "kernel", kernel)
    monkeypatch.setattr(plgpu, "wgmma", multiply)
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    monkeypatch.setattr(kept_mosaic, "_converted", converted)
    monkeypatch.setattr(kept_mosaic, "_store", store)


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
@pytest.mark.parametrize("M", [1, 20])
def test_products(interpreted, M, tile, pieces, halves):
    rng = np.random.default_rng(M)
    codes = jnp.asarray(rng.integers(-8, 9, (K, N)), jnp.float8_e4m3fn)
    scales = jnp.asarray(2.0 ** rng.integers(-3, 0, (K // 128, N)), jnp.float32)
    w, x = Quantised(codes, scales, None, 128), jnp.asarray(rng.integers(-4, 5, (M, K)), "bfloat16")
    got = product(x, fragments(w), pieces=pieces, tile=tile, halves=halves)
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
