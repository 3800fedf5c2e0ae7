"""The canonical kernels of one program a row: right, and the same bits at every number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.in_pairs import sum_in_pairs
from pallas_kernels.matmul.canonical import plus
from pallas_kernels.rms_norm import canonical, reference
from pallas_kernels.unsummed import Unsummed, add_pieces, summed
from tests.support.attention_checks import ON_GPU

HOW = {"interpret": not ON_GPU}


def draw(seed: int, *shape: int, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def check(op, want, *rows) -> None:
    whole = np.asarray(op(*rows), np.float32)
    np.testing.assert_allclose(whole, np.asarray(want(*rows), np.float32), rtol=1e-2, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(op(*(x[:1] for x in rows)), np.float32), whole[:1])


@pytest.mark.parametrize("D", [64, 576])
def test_norm(D):
    scale = draw(1, D)
    check(
        lambda x: canonical.rms_norm(x, scale, 1e-6, **HOW),
        lambda x: reference.rms_norm(x, scale, 1e-6),
        draw(0, 5, D),
    )


@pytest.mark.parametrize(
    "P, D, made", [(2, 64, "float32"), (3, 576, "float32"), (1, 64, "bfloat16")]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_norm_that_makes_the_sum_has_the_bits_of_both_kernels(P, D, made, dtype):
    sums = Unsummed(draw(2, P, 5, D, dtype=made), draw(3, 5, D))
    x, normed = canonical.after(sums, draw(1, D, dtype=dtype), 1e-6, **HOW)
    want = summed(sums, **HOW)
    np.testing.assert_array_equal(x, want)
    np.testing.assert_array_equal(
        normed, canonical.rms_norm(want, draw(1, D, dtype=dtype), 1e-6, **HOW)
    )
    assert (np.asarray(want) != np.asarray(sums.residual)).any()
    if P == 1:  # a product that is whole
        np.testing.assert_array_equal(want, plus(sums.residual, sums.pieces[0]))


def test_pieces_are_rounded_before_the_residual():
    sums, residual = jnp.array([[[1.0]], [[2.0**-8]]]), jnp.array([[2.0**-8]], jnp.bfloat16)
    sums, residual = jnp.tile(sums, (1, 1, 64)), jnp.tile(residual, (1, 64))
    out = add_pieces(sums, residual, dtype=jnp.bfloat16, **HOW)
    assert (out == 1).all()  # 1 + 2^-8 rounds to 1, twice; at once it would be 1 + 2^-7


def test_pairs_are_added_as_neighbours():
    assert sum_in_pairs(jnp.array([2.0**24, 1, 1, 1])) == 2**24 + 2
