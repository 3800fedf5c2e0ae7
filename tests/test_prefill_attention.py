"""Prefill attention: every backend against loops in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.prefill_attention import BACKENDS as PREFILL_BACKENDS
from pallas_kernels.prefill_attention import prefill_attention
from tests.attention_checks import by_hand, inputs


@pytest.mark.parametrize("backend", sorted(PREFILL_BACKENDS))
@pytest.mark.parametrize("offset", [0, 1, 9, 24])
def test_prefill_is_bottom_right_causal(backend, offset):
    shape = (2, 16, 40, 4, 2, 16)
    q, k, v = inputs(shape)
    lengths, widths = jnp.full(2, offset), jnp.full(2, 16)
    got = prefill_attention(q, k, v, jnp.int32(offset), scale=0.25, backend=backend)
    np.testing.assert_allclose(got, by_hand(q, k, v, lengths, widths, True), atol=2e-6)
