"""The GEMMs, right by inspection: float32 throughout, rounded where the contract says."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts, halves


def _product(x, w):
    return jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")


def matmul(
    x: Float[Array, "M K"], w: Float[Array, "K N"], residual: Float[Array, "M N"] | None = None
) -> Float[Array, "M N"]:
    out = _product(x, w).astype(x.dtype)
    if residual is None:
        return out
    return (residual.astype(jnp.float32) + out.astype(jnp.float32)).astype(x.dtype)


def gate_up(
    x: Float[Array, "M K"], w: Float[Array, "K FF"], firsts: Firsts | None = None
) -> Float[Array, "M F"]:
    rounded = _product(x, w).astype(x.dtype).astype(jnp.float32)
    gate, up = halves(rounded, firsts)
    return (gate / (1 + jnp.exp(-gate)) * up).astype(x.dtype)


def head_argmax(x: Float[Array, "M K"], head: Float[Array, "V K"]) -> Int[Array, " M"]:
    return jnp.argmax(_product(x, head.T), axis=-1).astype(jnp.int32)


def largest_and_sums(
    logits: Float[Array, "M V"],
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Per row the largest logit, and the sum of exp(logit - largest)."""
    largest = jnp.max(logits, axis=-1)
    return largest, jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1)


def canonical(
    x: Float[Array, "M K"], w: Float[Array, "K N"], pieces: int, step: int = 16
) -> Float[Array, "M N"]:
    """The canonical form's float32 sum, before it is rounded: ascending by steps, then by pieces.

    Inside a step of 16 a tensor core has another order: it aligns the products to the largest
    and cuts off what is below, where this adds them in float32.
    """

    def piece(begin: int, end: int):
        steps = (_product(x[:, k : k + step], w[k : k + step]) for k in range(begin, end, step))
        return functools.reduce(jnp.add, steps)

    K = w.shape[0]
    length = K // pieces
    return functools.reduce(jnp.add, (piece(k, k + length) for k in range(0, K, length)))
