"""A target's logits over a text, in one pass, and what being equal to the reference's means."""

import jax.numpy as jnp
import numpy as np

from jflash.layers.passes import Rows
from jflash.speculative import apply
from tests.support import reference


def target_logits(model, params, ids: list[int]) -> np.ndarray:
    """[ids, vocabulary]."""
    count = len(ids)
    attend = Rows(jnp.tril(jnp.ones((count, count), bool))[None, None])
    caches = (None,) * model.config.num_layers
    hidden, *_ = apply(model, params, jnp.array([ids]), jnp.arange(count)[None], caches, attend, ())
    return np.asarray(apply(model, params, hidden, method="logits")[0])


def close(got: np.ndarray, want: np.ndarray) -> None:
    """As the reference's, and no constants."""
    assert np.ptp(want) > 1
    reference.close(got, want)
