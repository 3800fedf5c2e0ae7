"""A target's logits over a text, in one pass, and what being equal to the reference's means."""

import jax.numpy as jnp
import numpy as np

from jflash.layers import MaskAttend
from jflash.speculative import apply


def target_logits(model, params, ids: list[int]) -> np.ndarray:
    """[ids, vocabulary]."""
    count = len(ids)
    attend = MaskAttend(jnp.tril(jnp.ones((count, count), bool))[None, None])
    caches = (None,) * model.config.num_layers
    hidden, *_ = apply(model, params, jnp.array([ids]), jnp.arange(count)[None], caches, attend, ())
    return np.asarray(apply(model, params, hidden, method="logits")[0])


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Equal to 1e-4 of the largest entry: float32 sums in another order."""
    assert got.shape == want.shape and np.ptp(want) > 1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
