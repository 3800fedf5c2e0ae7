"""The grouped GEMMs, right by inspection: every row with every expert in float32, one of them kept.

Rounded where the contract says. All experts are computed: for tests at small sizes.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts, halves

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss's activation


def _product(x, w, sizes):
    every = jnp.einsum(
        "RK,EKN->ERN", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest"
    )
    ends = jnp.cumsum(sizes)
    expert = jnp.sum(jnp.arange(len(x))[:, None] >= ends, axis=1)
    return every[expert, jnp.arange(len(x))].astype(x.dtype)


def grouped_matmul(
    x: Float[Array, "R K"], w: Float[Array, "E K N"], sizes: Int[Array, " E"]
) -> Float[Array, "R N"]:
    return _product(x, w, sizes)


def grouped_gate_up(
    x: Float[Array, "R K"],
    w: Float[Array, "E K FF"],
    sizes: Int[Array, " E"],
    firsts: Firsts | None = None,
) -> Float[Array, "R F"]:
    gate, up = halves(_product(x, w, sizes).astype(jnp.float32), firsts)
    return (gate / (1 + jnp.exp(-gate)) * up).astype(x.dtype)


def clamped_gate(gate: Float[Array, "R F"], up: Float[Array, "R F"]) -> Float[Array, "R F"]:
    open_ = jnp.minimum(gate.astype(jnp.float32), LIMIT)
    bounded = jnp.clip(up.astype(jnp.float32), -LIMIT, LIMIT)
    return ((bounded + 1) * (open_ / (1 + jnp.exp(-ALPHA * open_)))).astype(gate.dtype)


def probabilities(logits: Float[Array, "M E"]) -> Float[Array, "M E"]:
    return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)


def sigmoids(logits: Float[Array, "M E"]) -> Float[Array, "M E"]:
    return 1 / (1 + jnp.exp(-logits.astype(jnp.float32)))


def weighted_sum(
    outputs: Float[Array, "M k D"], weights: Float[Array, "M k"]
) -> Float[Array, "M D"]:
    wide = outputs.astype(jnp.float32)
    terms = (weights[:, i, None] * wide[:, i] for i in range(outputs.shape[1]))
    return functools.reduce(jnp.add, terms)
