"""Random weights by which a cut target's attention and logits are as spread as a trained one's.

Norms of 1 do not give that everywhere. Where queries are normed and their products hardly scaled
(Gemma 4's have a standard deviation of 16), attention reads one place, which the last bit of a key
may change. A head that is its embedding, after a residual that begins with that embedding, finds
the token that it has just read. And a head of a small multiplier has flat logits.
Only norms' scales are changed, so shapes, kernels and all else are the target's.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jflash.models.params import SCALE
from jflash.records.config import TargetConfig
from jflash.records.specs import AttentionSpec

LEAST, MOST = 0.9, 4.0  # the standard deviation of a row's logits


def usual_weights(config: TargetConfig, params: Any, seed: int = 0) -> Any:
    """The `params` of random_weights with the scales of query norms and of the last norm changed.

    A normed query's products with normed keys get a standard deviation of 1 at most, and logits one
    between LEAST and MOST. Under a tied head half of the last norm's scales are negative, so that a
    row of the head is no nearer to its own embedding than to another.
    """
    for i, layer in enumerate(config.layers):
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec) and mixer.qk_norm and not mixer.weightless:
            spread = mixer.scale * mixer.head_dim**0.5
            if spread > 1:
                params = _scaled(params, (f"layers_{i}", "attention", "q_norm"), 1 / spread)
    spread = SCALE * config.hidden_size**0.5 * config.logit_multiplier
    factor = jnp.float32(min(max(spread, LEAST), MOST) / spread)
    if config.tie_embeddings:
        signs = jax.random.rademacher(jax.random.key(seed), (config.hidden_size,), jnp.float32)
        factor = factor * signs
    return _scaled(params, ("norm",), factor)


def _scaled(params: Any, path: tuple[str, ...], factor: Any) -> Any:
    """The tree with the scale of the norm at `path` times a factor."""
    if not path:
        scale = params["scale"]
        return params | {"scale": (scale * factor).astype(scale.dtype)}
    first, *rest = path
    return params | {first: _scaled(params[first], tuple(rest), factor)}
