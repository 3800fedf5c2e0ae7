"""A layer of experts in few kernels: lists of rows, routes, sums, and the layer itself.

Without a GPU the kernels run through Pallas' interpreter.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.layers.experts import Experts
from jflash.layers.routes import route
from jflash.records.kernels import Kernels
from jflash.records.leaves import declared
from jflash.records.specs import MoeSpec
from pallas_kernels.grouped_matmul import canonical, sums, tokens_of
from pallas_kernels.rms_norm import canonical as rms_norm
from pallas_kernels.rms_norm.after_experts import after_experts
from tests.support.attention_checks import ON_GPU

HOW = {"interpret": not ON_GPU}
WIDTH = 128
PLAIN = MoeSpec(num_experts=32, experts_per_token=3, intermediate_size=128, renormalise=True)
LAYERS = {
    "plain": PLAIN,
    "shared expert": replace(PLAIN, shared_size=128),
    "clamped, with biases": replace(PLAIN, clamped=True, bias=True, scores="softmax of the chosen"),
    "gelu": replace(PLAIN, activation="gelu_tanh", renormalise=False),
    "sigmoids": replace(PLAIN, scores="sigmoid", groups=4, kept_groups=2, scale=1.5),
}


def held_rows(tiles: tokens_of.Tiles, rows: int, experts: int) -> dict[int, int]:
    """The expert of each row that a tile holds, by the rule in `Tiles`."""
    members, block, found = np.asarray(tiles.members), tiles.members.shape[1], {}
    for tile, expert in enumerate(np.asarray(tiles.expert)):
        for i, row in enumerate(members[tile]):
            if not (0 <= row < rows and 0 <= expert < experts):
                continue
            if tiles.places is None or tiles.places[row] == tile * block + i:
                assert i == 0 or int(members[tile, 0]) in found  # else the kernel skips the tile
                assert int(row) not in found
                found[int(row)] = int(expert)
    return found


@pytest.mark.parametrize(
    ("M", "k", "E"), [(1, 4, 8), (5, 3, 6), (16, 8, 128), (40, 4, 4), (70, 2, 40)]
)
def test_every_row_is_in_one_tile_of_its_expert(M, k, E, monkeypatch):
    """Also if some experts are on other devices, and with the sort for many rows."""
    rng = np.random.default_rng(M)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(M)])
    ids[: M // 2] = ids[0]  # so that some experts have several tiles
    for held, most in ((E, 8192), (E // 2, 8192), (E, 0), (E // 2, 0)):
        monkeypatch.setattr(tokens_of, "MOST_COUNTED", most)
        tiles = tokens_of.tiles_of_tokens(jnp.array(ids), held, **HOW)
        want = {row: int(e) for row, e in enumerate(ids.flat) if e < held}
        assert held_rows(tiles, M * k, held) == want


@pytest.mark.parametrize("scores", ["softmax", "softmax of the chosen"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routes_are_the_references(scores, renormalise):
    """With many ties, a product in pieces and a bias, and the same bits alone."""
    spec = MoeSpec(
        num_experts=60, experts_per_token=5, intermediate_size=8, renormalise=renormalise,
        scores=scores,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    pieces = jnp.asarray(np.round(rng.standard_normal((2, 9, 60)) * 2), jnp.float32)
    bias = jnp.asarray(np.round(rng.standard_normal(60)), jnp.bfloat16)
    choose = functools.partial(
        canonical.route, k=5, chosen=scores != "softmax", renormalise=renormalise, **HOW
    )
    weights, ids = choose(pieces, bias)
    want, right = route((pieces[0] + pieces[1] + bias) + 0.0, spec)  # no -0, which is less than 0
    np.testing.assert_array_equal(ids, right)
    np.testing.assert_allclose(weights, want, rtol=2e-6)
    alone = choose(pieces[:, 3:4], bias)
    np.testing.assert_array_equal(alone[0], weights[3:4])
    np.testing.assert_array_equal(alone[1], ids[3:4])


def layer(name: str, experts: str):
    """The layer as a function of rows, and its rows; its weights lie in bfloat16."""
    module = Experts(WIDTH, LAYERS[name])
    count = iter(range(100))

    def draw(leaf):
        drawn = 0.3 * jax.random.normal(jax.random.key(next(count)), leaf.stored)
        return drawn.astype(leaf.dtype or jnp.bfloat16)

    params = jax.tree.map(draw, declared(module), is_leaf=lambda x: hasattr(x, "stored"))
    other = "canonical" if ON_GPU else "cpu"
    kernels = Kernels(matmul=other, norm=other, experts=experts)
    x, residual = (jax.random.normal(jax.random.key(i), (1, 40, WIDTH), "bfloat16") for i in (7, 8))
    return lambda *rows: module.apply({"params": params}, *rows, kernels), x, residual


@pytest.fixture
def interpreted(monkeypatch):
    for name in ("tiles_of_tokens", "of_tokens", "expert_sum", "route", "sigmoids"):
        call = functools.partial(getattr(canonical, name), **HOW)
        monkeypatch.setattr(canonical, name, call)
    monkeypatch.setattr(sums, "expert_sum", canonical.expert_sum)


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_the_references_and_a_tokens_bits_are_its_own(interpreted, name):
    run, x, residual = layer(name, "canonical")
    whole = np.asarray(run(x, residual), np.float32)
    for M in (1, 5, 16):
        got = np.asarray(run(x[:, -M:], residual[:, -M:]), np.float32)
        np.testing.assert_array_equal(got, whole[:, -M:])
    run, *rows = layer(name, "reference")
    want = np.asarray(run(*rows), np.float32)
    apart = np.abs(whole - want).max(axis=-1) / np.abs(want).max(axis=-1)
    # The last bit of a logit may choose another expert for a token or two.
    assert np.median(apart) < 0.01 and (apart < 0.03).mean() > 0.9


def test_a_kernel_that_mixes_rows_would_be_seen(interpreted, monkeypatch):
    """Tiles whose rows are another token's."""
    right = canonical.tiles_of_tokens

    def wrong(ids, experts):
        tiles = right(ids, experts)
        return tiles._replace(expert=jnp.roll(tiles.expert, 1))

    run, x, residual = layer("plain", "canonical")
    whole = np.asarray(run(x, residual), np.float32)
    monkeypatch.setattr(canonical, "tiles_of_tokens", wrong)
    assert (np.asarray(run(x, residual), np.float32) != whole).mean() > 0.5


def test_experts_are_added_in_the_tokens_own_ranking():
    """Numbers whose sum in float32 depends on the order; the residual comes last."""
    outputs = jnp.array([[[1e8], [-1e8], [1.0]], [[1.0], [1e8], [-1e8]]], jnp.bfloat16)
    big = jnp.tile(outputs, (1, 1, 64))
    for residual, want in (
        (None, [[1.0], [0.0]]),
        (jnp.full((2, 64), 2.0, "bfloat16"), [[3], [2]]),
    ):
        got = canonical.expert_sum(big, jnp.ones((2, 3)), None, residual, **HOW)
        np.testing.assert_array_equal(got, np.tile(want, (1, 64)))


@pytest.mark.parametrize("M", [1, 5])
@pytest.mark.parametrize("width", [256, 192])
@pytest.mark.parametrize("kind", ["alone", "shared", "a gate", "by place"])
def test_a_norm_that_adds_them_has_the_bits_of_both_kernels(M, width, kind):
    k, P = 3, 2
    draw = functools.partial(draws, np.random.default_rng(M))
    outputs, weights = draw(M, k, width), jnp.asarray(draw(M, k), jnp.float32)
    residual, scale = draw(1, M, width), draw(width)
    shared = {
        "shared": sums.Shared(draw(P, M, width).astype(jnp.float32)),
        "a gate": sums.Shared(draw(P, M, width).astype(jnp.float32), draw(M, 96), draw(96)),
    }.get(kind)
    places = None
    if kind == "by place":
        places = jnp.asarray(np.random.default_rng(0).permutation(M * k), jnp.int32)
        outputs = outputs.reshape(-1, width)
    given = sums.Weighed(outputs, weights, shared, residual, places)
    x, normed = after_experts(given, scale, 1e-6, **HOW)
    want = sums.expert_sum(*given._replace(residual=residual[0]), **HOW)[None]
    np.testing.assert_array_equal(x, want)
    np.testing.assert_array_equal(normed, rms_norm.rms_norm(want, scale, 1e-6, **HOW))
    assert len(np.unique(np.asarray(x, np.float32))) > width // 2


def draws(rng, *shape: int):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
