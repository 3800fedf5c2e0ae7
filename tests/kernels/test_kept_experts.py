"""Products of experts' codes in fragments, and which tiles a routing fills.

Without a GPU the lists and sums run through Pallas' interpreters, and so does the product, as in
test_kept_mosaic. Numbers are whole, or halved, so that no sum is rounded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import canonical, kept, kept_mosaic, tokens_of, used
from pallas_kernels.matmul.kept.fragments import fragments
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised
from tests.support.attention_checks import ON_GPU
from tests.support.kept_interpreter import interpreted as interpreted

HOW = {"interpret": not ON_GPU}


def routing(rng, M: int, k: int, E: int):
    """Ids of which the first half of the tokens share theirs, so that some experts have none."""
    ids = np.stack([rng.permutation(E)[:k] for _ in range(M)])
    ids[: M // 2] = ids[0]
    return jnp.asarray(ids)


@pytest.mark.parametrize(("M", "k", "E"), [(1, 4, 8), (5, 3, 6), (16, 8, 128), (16, 10, 40)])
def test_of_few_tokens_each_expert_with_rows_is_listed_once(M, k, E):
    ids = routing(np.random.default_rng(M), M, k, E)
    work = used.of_few(ids, E, **HOW)
    count = int(work.count[0])
    assert sorted(np.asarray(work.expert)[:count]) == sorted(set(np.asarray(ids).flat))
    np.testing.assert_array_equal(work.tile[:count], work.expert[:count])


@pytest.mark.parametrize(("M", "k", "E"), [(40, 4, 4), (70, 2, 40), (64, 8, 16)])
@pytest.mark.parametrize("most", [8192, 0])
def test_the_list_has_each_tile_with_rows_once(M, k, E, most, monkeypatch):
    monkeypatch.setattr(tokens_of, "MOST_COUNTED", most)  # 0: by a sort
    ids = routing(np.random.default_rng(M), M, k, E)
    tiles = tokens_of.tiles_of_tokens(ids, E, **HOW)
    work, block = used.of_many(tiles, **HOW), tiles.members.shape[1]
    count, places = int(work.count[0]), np.asarray(tiles.places)
    listed = dict(zip(np.asarray(work.tile)[:count], np.asarray(work.expert)[:count], strict=True))
    assert len(listed) == count
    assert listed == dict(zip(places // block, np.asarray(ids).flat, strict=True))
    x = jnp.arange(M * 64, dtype=jnp.float32).reshape(M, 64)
    rows = used.rows_of(x, tiles, work, k, **HOW)
    np.testing.assert_array_equal(np.asarray(rows)[places], np.repeat(x, k, axis=0))


def weight(rng, E: int, K: int, N: int) -> Quantised:
    codes = jnp.asarray(rng.integers(-2, 3, (E, K, N)), jnp.float8_e4m3fn)
    return Quantised(
        codes, jnp.asarray(2.0 ** rng.integers(-1, 1, (E, K // 128, N)), "f4"), None, 128
    )


def numbers(w: Quantised):
    return np.asarray(dequantised(w, "float32"))


@pytest.mark.parametrize(("M", "few"), [(1, 16), (12, 16), (12, 8)])
def test_a_layer_of_experts(interpreted, monkeypatch, M, few):
    """Tokens that share tiles, or have tiles of their own, and CTAs that walk several pairs."""
    E, k, K, F, D = 6, 2, 256, 128, 128
    monkeypatch.setattr(used, "FEW", few)
    monkeypatch.setattr(kept_mosaic, "SMS", 2)
    for name in ("of_few", "of_many", "rows_of"):
        monkeypatch.setattr(used, name, functools.partial(getattr(used, name), **HOW))
    monkeypatch.setattr(
        kept, "tiles_of_tokens", functools.partial(tokens_of.tiles_of_tokens, **HOW)
    )
    rng = np.random.default_rng(M)
    first, down = weight(rng, E, K, 2 * F), weight(rng, E, F, D)
    x, ids = jnp.asarray(rng.integers(-1, 2, (M, K)), "bfloat16"), routing(rng, M, k, E)
    inner = kept.gate_up_of_fragments(x, ids, fragments(first), (F, 0))
    rows, places = kept.down_of_fragments(inner, ids, fragments(down)), inner.places

    @jax.jit
    def inner(both):
        gate, up = (both[:, i : i + F].astype("bfloat16").astype("float32") for i in (F, 0))
        return (gate / (1 + jnp.exp(-gate)) * up).astype("bfloat16")

    arrays, got = (numbers(first), numbers(down)), np.asarray(rows, "float32")[places]
    for row, expert in enumerate(np.asarray(ids).flat):
        both = np.asarray(x[row // k], "float32")[None] @ arrays[0][expert]
        wide = np.asarray(inner(jnp.asarray(both)), "float32")
        want = jnp.asarray(wide @ arrays[1][expert], "bfloat16")[0]
        np.testing.assert_allclose(got[row], np.asarray(want, "float32"), rtol=1e-2)

    weights = jnp.asarray(rng.random((M, k)), "float32")
    by_place = canonical.expert_sum(rows, weights, None, None, places, **HOW)
    apart = canonical.expert_sum(jnp.asarray(got, "bfloat16").reshape(M, k, D), weights, **HOW)
    np.testing.assert_array_equal(by_place, apart)
