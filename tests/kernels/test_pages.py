"""Attention through a table of pages: the bits of a cache in which the pages lie side by side."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import PAGE, canonical, cpu, gathered, mosaic_gpu, xla
from pallas_kernels.block_attention.mosaic_task import Tiles
from pallas_kernels.heads_to_cache import Heads, heads_to_cache
from tests.support.attention_checks import ON_GPU
from tests.support.described_gpu import H200, compile_for

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


@pytest.mark.skipif(ON_GPU, reason="a GPU is described to a process of CPUs alone")
@pytest.mark.parametrize("shared", [True, False])
def test_queries_are_not_turned_on_their_way_to_attention(shared):
    """Where all sequences' rows pass for one's, a kernel a layer turned their queries."""
    (B, T), heads, S = (8, 16), Heads(8, 2, 128, 1e-6, (0, 1024, 1280)), 8 * PAGE

    def attend(x, scale, cos, sin, k, v, table, lengths, places):
        rows = (x, scale, scale, cos, sin)
        pools = k.reshape(1, -1, 2, 128), v.reshape(1, -1, 2, 128)
        if not shared:
            x, cos, sin = (a.reshape(*a.shape[:-3], 1, B * T, a.shape[-1]) for a in (x, cos, sin))
            rows, places = (x, scale, scale, cos, sin), places.reshape(1, -1)
        q, *caches = heads_to_cache(
            *rows, *pools, places, heads=heads, backend="triton", rising=False
        )
        k, v = (cache.reshape(k.shape) for cache in caches)
        how = {"causal": True, "scale": 0.1, "table": table}
        q = q.reshape(B, T, *q.shape[2:])
        return canonical.block_attention(q, k, v, lengths, jnp.full(B, T), **how), k, v

    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    angles, pool = ((B, T, 64), f32), ((64, PAGE, 2, 128), bf16)
    inputs = [((1, B, T, 1536), bf16), ((128,), bf16), angles, angles, pool, pool]
    inputs += [((B, S // PAGE), i32), ((B,), i32), ((B, T), i32)]
    compiled = compile_for(H200, attend, *(jax.ShapeDtypeStruct(*each) for each in inputs))
    assert bool(re.search(r"%\S*transpose\S* = ", str(compiled.as_text()))) != shared
