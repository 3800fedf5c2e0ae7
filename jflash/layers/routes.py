"""A router's choice, from its logits: the experts of each token and their weights.

Axes: M tokens, k experts a token, E experts.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jflash.records.specs import MoeSpec
from pallas_kernels.grouped_matmul import probabilities, sigmoids


def route(
    logits: Float[Array, "M E"], spec: MoeSpec, backend: str = "xla"
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """The k most probable experts of each token, the best first, and their float32 weights.

    Equal probabilities go to the lowest expert id. Without `renormalise` weights are the
    probabilities over all experts, with it they add up to 1.
    """
    k = spec.experts_per_token
    if spec.scores == "softmax of the chosen":
        chosen, ids = lax.top_k(logits, k)
        return probabilities(chosen, backend=backend), ids
    weights, ids = lax.top_k(probabilities(logits, backend=backend), k)
    return (_renormalised(weights) if spec.renormalise else weights), ids


def route_by_sigmoid(
    logits: Float[Array, "M E"],
    correction: Float[Array, " E"],
    spec: MoeSpec,
    backend: str = "xla",
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """`route` by sigmoids: the correction changes the choice and no weight."""
    scores = sigmoids(logits, backend=backend)
    _, ids = lax.top_k(_of_kept_groups(scores + correction, spec), spec.experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    return (_renormalised(weights) if spec.renormalise else weights) * spec.scale, ids


def _of_kept_groups(scores: Float[Array, "M E"], spec: MoeSpec) -> Float[Array, "M E"]:
    """The scores, -inf outside the groups whose two best add up to most."""
    if spec.groups == 1:
        return scores
    groups = scores.reshape(len(scores), spec.groups, -1)
    best = lax.top_k(groups, 2)[0]
    _, kept = lax.top_k(best[..., 0] + best[..., 1], spec.kept_groups)
    inside = jnp.any(jnp.arange(spec.groups) == kept[..., None], axis=1)
    return jnp.where(inside[..., None], groups, -jnp.inf).reshape(scores.shape)


def _renormalised(weights: Float[Array, "M k"]) -> Float[Array, "M k"]:
    """Weights that add up to 1."""
    k = weights.shape[1]
    return weights / functools.reduce(jnp.add, (weights[:, i] for i in range(k)))[:, None]
