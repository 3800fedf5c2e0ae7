"""The loss of a DFlash 2 drafter's selector, which chooses the target's token among candidates.

The authors' loss is not public. This one is cross-entropy over the scores of a place's candidates,
given the target's token before the place. If the candidates lack the target's token, the loss adds
it. The scores contain the head's logits, so the layers learn from this loss too.
Axes besides the package's: A anchors of a row, K places past an anchor, R rank.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash.models.dflash2 import best_candidates
from jflash.records.config import Drafter2Config
from jflash.training.losses import cross_entropy, lookup, products


def selector_losses(
    config: Drafter2Config, selector: Any, hidden: Float[Array, "B A K D"],
    logits: Float[Array, "B A K V"], previous: Int[Array, "B A K"], labels: Int[Array, "B A K"],
) -> tuple[Float[Array, "B A K"], Int[Array, "B A K"]]:  # fmt: skip
    """The loss of each place, and the token that decoding chooses there after `previous`.

    Every token gets a score and only candidates count: a matrix product of rank R costs little
    beside the head's, and its gradients are sums in a fixed order.
    """
    shape, vocab = labels.shape, logits.shape[-1]
    flat = hidden.reshape(shape[0], -1, hidden.shape[-1]), previous.reshape(shape[0], -1)
    scores = logits + gains(selector, *flat).reshape(logits.shape)
    fixed = jax.lax.stop_gradient(logits).reshape(shape[0], -1, vocab)
    least = best_candidates(fixed, config.selector_top_k)[0][..., -1].reshape(shape)
    candidate = logits >= least[..., None]
    label = jnp.arange(vocab) == labels[..., None]
    losses = cross_entropy(jnp.where(candidate | label, scores, -jnp.inf), labels)
    return losses, jnp.argmax(jnp.where(candidate, scores, -jnp.inf), axis=-1)


def gains(
    selector: Any, hidden: Float[Array, "B T D"], previous: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """`CandidateSelector` for every token that may follow `previous`."""
    kernel = selector["hidden_projection"]["kernel"]
    projected = jnp.einsum("BTD,DR->BTR", hidden, kernel, precision="highest")
    left = lookup(selector["predecessor_codebook"], previous) * projected
    return products(left, selector["successor_codebook"])
