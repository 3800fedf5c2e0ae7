"""A shared expert's products beside the experts': the bits of products with launches of their own.

Without a GPU the kernels run through Pallas' interpreter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.layers.experts import Experts
from jflash.records.kernels import Kernels
from jflash.records.leaves import declared
from jflash.records.specs import MoeSpec
from pallas_kernels.grouped_matmul import beside, canonical, sums
from pallas_kernels.matmul import canonical as products
from pallas_kernels.matmul import few_rows
from pallas_kernels.matmul.kept.quantised import Quantised
from tests.support.attention_checks import ON_GPU

HOW: dict[str, Any] = {"interpret": not ON_GPU}
WIDTH, INNER, EXPERTS, K = 128, 384, 8, 3  # 384 numbers are summed in two pieces
GATED = MoeSpec(
    num_experts=64, experts_per_token=K, intermediate_size=INNER, renormalise=True,
    shared_size=INNER,
)  # fmt: skip


def drawn(seed: int, *shape: int):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def operands(M: int):
    """Rows, the experts' tiles, and both weights of the experts and of the shared one."""
    rng = np.random.default_rng(M)
    ids = jnp.array(np.stack([rng.permutation(EXPERTS)[:K] for _ in range(M)]))
    tiles = canonical.tiles_of_tokens(ids, EXPERTS, **HOW)
    first, down = drawn(1, EXPERTS, WIDTH, 2 * INNER), drawn(2, EXPERTS, INNER, WIDTH)
    return (
        drawn(0, M, WIDTH),
        tiles,
        first,
        down,
        drawn(3, WIDTH, 2 * INNER),
        drawn(4, INNER, WIDTH),
    )


@pytest.fixture(
    params=[beside.WIDE, beside.DEEP, beside.NARROWEST], ids=["wide", "deep", "narrowest"]
)
def tile(request, monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(beside, "tile_of", lambda *_: request.param)
    yield
    jax.clear_caches()


def test_few_programs_have_narrow_tiles():
    """Qwen3.5-35B-A3B's first and second product for one token, and for eight."""
    tiles = [beside.tile_of(512, 9), beside.tile_of(2048, 10), beside.tile_of(512, 66)]
    assert tiles == [beside.NARROW, beside.WIDE, beside.WIDE]
    # Gates and ups of arrays, of Qwen3-Coder-Next's too, and a half of them over two devices.
    tiles = [beside.tile_of(*sizes, 2048) for sizes in ((512, 9), (512, 11), (256, 9), (512, 66))]
    assert tiles == [beside.DEEP, beside.DEEP, beside.NARROW, beside.WIDE]
    # Columns of one device of several, which wider tiles do not divide.
    assert [beside.tile_of(n, 66) for n in (352, 176)] == [beside.NARROW, beside.NARROWEST]


@pytest.mark.parametrize("M", [1, pytest.param(5, marks=pytest.mark.long), 16])
def test_bits_are_those_of_two_launches_each(tile, M):
    """The halves of the two first weights lie in different places."""
    x, tiles, first, down, both, last = operands(M)
    R, firsts = M * K, ((INNER, 0), (0, INNER))
    inner, own = beside.gate_up(x, first, tiles, R, both, firsts, **HOW)
    gate = canonical.GATES["silu"]
    want = canonical.of_tokens(x, first, tiles, R, None, firsts[0], gate, **HOW)
    np.testing.assert_array_equal(inner, want)
    np.testing.assert_array_equal(own, products.gate_up(x, both, firsts[1], **HOW))
    out, pieces = beside.matmul(inner, down, tiles, R, own, last, **HOW)
    np.testing.assert_array_equal(out, canonical.of_tokens(inner, down, tiles, R, **HOW))
    want = products.partial_products(own, last, **HOW)
    assert pieces.shape == (2, M, WIDTH) and pieces.dtype == jnp.float32
    np.testing.assert_array_equal(pieces, want)


def test_a_devices_columns_keep_the_pieces_of_the_whole_weight():
    """A whole weight of so many columns takes its sums whole, and rounds them."""
    x, tiles, _, down, _, last = operands(2)
    inner, own = drawn(5, 2 * K, INNER), drawn(6, 2, INNER)
    _, pieces = beside.matmul(inner, down, tiles, 2 * K, own, last, columns=8192, **HOW)
    want = products.partial_products(own, last, columns=8192, **HOW)
    assert pieces.shape == (1, 2, WIDTH) and pieces.dtype == x.dtype
    np.testing.assert_array_equal(pieces, want)


def test_what_does_not_fit_keeps_its_own_launch():
    w, shared = drawn(0, EXPERTS, WIDTH, 128), drawn(1, WIDTH, 128)
    assert beside.fits(16, w, shared)
    assert not beside.fits(17, w, shared)
    assert not beside.fits(1, w, shared[:, :64])
    assert not beside.fits(1, w, shared.astype(jnp.float32))
    codes, scales = jnp.zeros((WIDTH, 128), jnp.float8_e4m3fn), jnp.ones((1, 128))
    assert not beside.fits(1, w, Quantised(codes, scales, None, WIDTH))


@pytest.fixture
def joined(monkeypatch):
    """Kernels run interpreted; yields how many rows each joined product had."""
    for name in ("tiles_of_tokens", "of_tokens", "expert_sum", "route"):
        monkeypatch.setattr(canonical, name, functools.partial(getattr(canonical, name), **HOW))
    monkeypatch.setattr(sums, "expert_sum", canonical.expert_sum)
    for name in ("matmul", "gate_up", "partial_products"):
        monkeypatch.setattr(products, name, functools.partial(getattr(products, name), **HOW))
    calls, right = [], {name: getattr(beside, name) for name in ("gate_up", "matmul")}
    for name, call in right.items():

        def seen(x, *rest, call=call):
            calls.append(len(x))
            return call(x, *rest, **HOW)

        monkeypatch.setattr(beside, name, seen)
    return calls


def layer():
    module, count = Experts(WIDTH, GATED), iter(range(100))
    params = jax.tree.map(
        lambda leaf: drawn(next(count), *leaf.stored).astype(leaf.dtype or jnp.bfloat16),
        declared(module),
        is_leaf=lambda x: hasattr(x, "stored"),
    )
    kernels = Kernels(matmul="canonical", norm="canonical", experts="canonical")
    return lambda *rows: np.asarray(module.apply({"params": params}, *rows, kernels), np.float32)


@pytest.mark.long
def test_a_tokens_bits_are_the_same_in_a_long_prompt(joined):
    """40 rows take a launch for each product, fewer take the joined ones."""
    run, x, residual = layer(), drawn(7, 1, 40, WIDTH), drawn(8, 1, 40, WIDTH)
    whole = run(x, residual)
    assert joined == []
    for M in (1, 5, 16):
        np.testing.assert_array_equal(run(x[:, -M:], residual[:, -M:]), whole[:, -M:])
    assert joined == [1, K, 5, 5 * K, 16, 16 * K]


def test_a_sum_over_the_whole_of_k_would_be_seen(monkeypatch):
    """A large number in each piece, the second one's negative: only there are small ones lost."""
    x, tiles, _, down, _, _ = operands(4)
    own = jnp.zeros((4, INNER)).at[:, INNER // 2 :].set(1)
    own = own.at[:, 0].set(2.0**40).at[:, INNER // 2].set(-(2.0**40)).astype(x.dtype)
    last = jnp.ones((INNER, WIDTH), x.dtype)

    def total():
        rows = drawn(5, 4 * K, INNER)
        return beside.matmul(rows, down, tiles, 4 * K, own, last, **HOW)[1].sum(axis=0)

    np.testing.assert_array_equal(total(), products.matmul(own, last, **HOW))
    assert (total() == 0).all()
    monkeypatch.setattr(beside, "pieces", lambda *sizes: 1)
    assert (total() >= 64).all()


def test_halves_that_change_places_would_be_seen(monkeypatch):
    x, tiles, first, _, both, _ = operands(3)
    right, firsts = few_rows.one_tile, ((0, INNER), (0, INNER))

    def wrong(*refs, halves, **how):
        right(*refs, halves=halves[::-1], **how)

    monkeypatch.setattr(few_rows, "one_tile", wrong)
    inner, own = beside.gate_up(x, first, tiles, 3 * K, both, firsts, **HOW)
    jax.clear_caches()
    monkeypatch.undo()
    want, right_own = beside.gate_up(x, first, tiles, 3 * K, both, firsts, **HOW)
    np.testing.assert_array_equal(inner, want)
    assert (own != right_own).mean() > 0.5
