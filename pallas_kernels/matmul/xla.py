"""The GEMMs as XLA compiles them for any device, written as jflash.layers.layer writes them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts, halves


def matmul(
    x: Float[Array, "M K"], w: Float[Array, "K N"], residual: Float[Array, "M N"] | None = None
) -> Float[Array, "M N"]:
    out = jnp.matmul(x, w, precision="highest")
    return out if residual is None else residual + out


def gate_up(
    x: Float[Array, "M K"], w: Float[Array, "K FF"], firsts: Firsts | None = None
) -> Float[Array, "M F"]:
    return silu_times(*halves(jnp.matmul(x, w, precision="highest"), firsts))


def silu_times(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"]
) -> Float[Array, "*lead F"]:
    return jax.nn.silu(gate) * up


def gelu_times(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"]
) -> Float[Array, "*lead F"]:
    wide = (half.astype(jnp.float32) for half in (gate, up))
    return (jax.nn.gelu(next(wide), approximate=True) * next(wide)).astype(gate.dtype)


def head_argmax(x: Float[Array, "M K"], head: Float[Array, "V K"]) -> Int[Array, " M"]:
    return jnp.argmax(head_logits(x, head), axis=-1).astype(jnp.int32)


def head_logits(x: Float[Array, "M K"], head: Float[Array, "V K"]) -> Float[Array, "M V"]:
    return jnp.einsum("MK,VK->MV", x, head, precision="highest", preferred_element_type=jnp.float32)


def sigmoid_times(
    gate: Float[Array, "*lead _"], x: Float[Array, "*lead F"]
) -> Float[Array, "*lead F"]:
    return (jax.nn.sigmoid(gate.astype(jnp.float32)) * x.astype(jnp.float32)).astype(x.dtype)
