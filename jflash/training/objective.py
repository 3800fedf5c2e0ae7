"""What a drafter's loss rewards: the loss of one place, the weight of a place, a curriculum.

Pure functions of logits and labels. Axes: K = W - 1 places past the anchor; lead axes are blocks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jflash.training.losses import cross_entropy
from jflash.training.recipe import Objective


def loss_decay(block_size: int) -> float:
    """γ of the weights exp(-(k - 1) / γ): the paper's 4, 5, 7 for W = 8, 10, 16.

    Other widths lie on the two straight lines through these points: W / 2 up to 10, then
    5 + (W - 10) / 3.
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def decay_weights(decay: float, places: int) -> Float[Array, " K"]:
    """exp(-(k - 1) / γ) for k = 1 … K."""
    return jnp.exp(-jnp.arange(places) / decay)


def dpace_weights(
    confidence: Float[Array, "*lead K"], live: Bool[Array, "*lead K"], alpha: float
) -> Float[Array, "*lead K"]:
    """D-PACE's weight of each place: its share of the expected accepted length (arXiv 2605.18810).

    With q̃ = (1 - α)·q + α for the probability q that the drafter gives the label, the weight of
    place j is Σ over m ≥ j of Π over i ≤ m of q̃_i: the expected length that needs j. A place that
    is not live ends the block. The gradient takes the weights as constants.
    """
    smooth = jnp.where(live, (1 - alpha) * confidence + alpha, 0.0)
    reach = jnp.cumprod(smooth, axis=-1)
    weights = jnp.flip(jnp.cumsum(jnp.flip(reach, -1), axis=-1), -1)
    return jax.lax.stop_gradient(jnp.where(live, weights, 0.0))


def kl_divergence(
    target: Float[Array, "*lead V"], drafter: Float[Array, "*lead V"]
) -> Float[Array, "*lead"]:
    """KL(p‖q) of two rows of logits, in nats."""
    log_p, log_q = jax.nn.log_softmax(target), jax.nn.log_softmax(drafter)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def total_variation(
    target: Float[Array, "*lead V"], drafter: Float[Array, "*lead V"]
) -> Float[Array, "*lead"]:
    """½ Σ |p - q|, the chance that a draft drawn from q is rejected."""
    return 0.5 * jnp.sum(jnp.abs(jax.nn.softmax(target) - jax.nn.softmax(drafter)), axis=-1)


def place_losses(
    objective: Objective,
    logits: Float[Array, "*lead K V"],
    target: Float[Array, "*lead K V"] | None,
    labels: Int[Array, "*lead K"],
) -> tuple[Float[Array, "*lead K"], Float[Array, "*lead K"]]:
    """The loss of each place, and the label's cross-entropy; a soft loss needs `target`."""
    cross = cross_entropy(logits, labels)
    if target is None:
        return cross, cross
    if objective.loss == "kl":
        return kl_divergence(target, logits), cross
    mixed = objective.ce_share * cross
    return mixed + (1 - objective.ce_share) * total_variation(target, logits), cross


def counted(objective: Objective, places: int, progress: Float[Array, ""]) -> Float[Array, " K"]:
    """The curriculum: 1 for places that count so far, 0 for the rest, a fraction in between.

    It grows from the first place to all of them, linearly over the first `curriculum` of the
    training.
    """
    if not objective.curriculum:
        return jnp.ones(places)
    reached = 1 + (places - 1) * progress / objective.curriculum
    return jnp.clip(reached - jnp.arange(places), 0.0, 1.0)
