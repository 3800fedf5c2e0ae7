"""What the training losses share: the head, the embedding, and cross-entropy."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jflash.models.decoder import Target


@jax.custom_vjp
def products(hidden, head):
    """hidden [B, T, D] against all rows of head [V, D], in float32."""
    return jnp.einsum(
        "BTD,VD->BTV", hidden, head, precision="highest", preferred_element_type=jnp.float32
    )


def _forward(hidden, head):
    return products(hidden, head), (hidden, head)


def _backward(kept, cotangent):
    # The cotangent is float32; left so, both products would run as float32 matmuls, ten times
    # slower than the rest of the step.
    hidden, head = kept
    cotangent = cotangent.astype(hidden.dtype)
    return (
        jnp.einsum("BTV,VD->BTD", cotangent, head, precision="highest"),
        jnp.einsum("BTV,BTD->VD", cotangent, hidden, precision="highest"),
    )


products.defvjp(_forward, _backward)


def head_logits(
    target: Target, params: Any, hidden: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """`Target.logits` (raw head, float32) with a backward pass in the dtype of `hidden`."""
    return products(hidden, params["embedding" if target.config.tie_embeddings else "head"])


@jax.custom_vjp
def lookup(matrix: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """matrix[tokens], whose gradient is a matmul with one-hot rows.

    A gather's gradient adds up in the compute dtype: in bfloat16 the thousands of small terms
    of a frequent token would be lost, and on a GPU their order, and so the bits, would be random.
    """
    return matrix[tokens]


def _lookup_forward(matrix, tokens):
    return matrix[tokens], (matrix, tokens)


def _lookup_backward(kept, cotangent):
    matrix, tokens = kept
    one_hot = jax.nn.one_hot(tokens, matrix.shape[0], dtype=cotangent.dtype)
    summed = jnp.einsum(
        "BTV,BTD->VD", one_hot, cotangent, precision="highest", preferred_element_type=jnp.float32
    )
    return summed.astype(matrix.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def cross_entropy(
    logits: Float[Array, "*lead V"], labels: Int[Array, "*lead"]
) -> Float[Array, "*lead"]:
    """-log softmax(logits)[label], in nats."""
    # A mask and not a gather, whose gradient would be a scatter over all logits.
    label = jnp.arange(logits.shape[-1]) == labels[..., None]
    chosen = jnp.sum(jnp.where(label, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def weighted_mean(values: Float[Array, "*n"], weights: Float[Array, "*n"]) -> Float[Array, ""]:
    """Σ weight · value / Σ weight; 0 where nothing has weight."""
    return jnp.sum(weights * values) / jnp.maximum(jnp.sum(weights), 1e-6)


def scale_residual_outputs(params: Any, num_layers: int) -> Any:
    """Initial params whose projections into the residual stream are scaled by 1/√(2 L) (GPT-2)."""

    def scale(path, leaf):
        names = [key.key for key in path]
        residual = names[-3:-1] in (["attention", "out"], ["mlp", "down"])
        return leaf / (2 * num_layers) ** 0.5 if residual and names[-1] == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(scale, params)


def agreeing(correct: Bool[Array, "*lead K"], live: Bool[Array, "*lead K"]) -> Int[Array, "*lead"]:
    """Length of the longest prefix that is live and correct, which greedy decoding accepts."""
    return jnp.sum(jnp.cumprod((correct & live).astype(jnp.int32), axis=-1), axis=-1)
