"""Attention through a table of pages: the bits of a cache in which the pages lie side by side."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import PAGE, cpu, gathered, mosaic_gpu, xla
from pallas_kernels.block_attention.mosaic_task import Tiles
from tests.support.attention_checks import ON_GPU

# Sequences of 3 columns; two share a page, one ends before its last column, which is no page.
TABLE = jnp.asarray([[4, 2, 0], [4, 1, 9], [9, 9, 9]], jnp.int32)
LENGTHS, WIDTHS = jnp.asarray([150, 90, 1]), jnp.asarray([4, 3, 4])


def mosaic(walk: bool):
    tiles = Tiles(chunk=64, block=64, stages=1, walk=walk, ordered=True)

    def attend(*arrays, **how):
        how |= {"tiles": tiles, "interpret": not ON_GPU}
        return mosaic_gpu.block_attention(*arrays, **how)

    return attend


@pytest.mark.parametrize(("backend", "window"), [("cpu", 70), ("walk", None), ("split", 70)])
def test_a_page_is_a_piece_of_the_cache(backend, window):
    if ON_GPU and backend == "cpu":
        pytest.skip("a CPU's form")
    attend = cpu.block_attention if backend == "cpu" else mosaic(backend == "walk")
    random = np.random.default_rng(1)
    shapes = (3, 4, 4, 64), (5, PAGE, 2, 64), (5, PAGE, 2, 64)
    q, k, v = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes)
    # Page 3 is nobody's: what it holds has no effect.
    k, v = k.at[3].set(jnp.nan), v.at[3].set(jnp.nan)
    how = {"causal": True, "scale": 0.3, "window": window}
    got = attend(q, k, v, LENGTHS, WIDTHS, table=TABLE, **how)
    side_by_side = gathered(k, TABLE), gathered(v, TABLE)
    want = attend(q, *side_by_side, LENGTHS, WIDTHS, **how)
    np.testing.assert_array_equal(got[:2], want[:2])
    near = xla.block_attention(q, *side_by_side, LENGTHS, WIDTHS, **how)
    np.testing.assert_allclose(got[0], near[0], atol=0.02)
    assert np.isfinite(np.asarray(got, np.float32)).all()
