"""The GEMMs on a CPU, with a row's bits the same at every M: XLA's product of fixed tiles of rows.

XLA's CPU product chooses its blocks, and with them the order of its sums, by the number of rows (a
single row has a special loop). Here it always gets TILE rows: fewer are padded with zeros, and more
are multiplied tile by tile.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.fixed_order import rounded
from pallas_kernels.halves import Firsts, halves

TILE = 16
GELU = (math.sqrt(2 / math.pi), 0.044715)  # tanh(a · (x + b · x³)) instead of the error function


def matmul(
    x: Float[Array, "M K"], w: Float[Array, "K N"], residual: Float[Array, "M N"] | None = None
) -> Float[Array, "M N"]:
    out = by_tiles(x, lambda rows: jnp.matmul(rows, w, precision="highest"))
    return out if residual is None else residual + out


def gate_up(
    x: Float[Array, "M K"], w: Float[Array, "K FF"], firsts: Firsts | None = None
) -> Float[Array, "M F"]:
    return silu_times(*halves(matmul(x, w), firsts))


def silu_times(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"]
) -> Float[Array, "*lead F"]:
    return jax.nn.silu(rounded(gate)) * up


def gelu_times(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"]
) -> Float[Array, "*lead F"]:
    x = rounded(gate.astype(jnp.float32))
    cube = rounded(GELU[1] * rounded(x * rounded(x * x)))
    open_ = 1 + rounded(jnp.tanh(rounded(GELU[0] * (x + cube))))
    half = rounded(0.5 * x)
    return rounded((half * open_ * up.astype(jnp.float32)).astype(gate.dtype))


def sigmoid_times(
    gate: Float[Array, "*lead _"], x: Float[Array, "*lead F"]
) -> Float[Array, "*lead F"]:
    open_ = jax.nn.sigmoid(rounded(gate.astype(jnp.float32)))
    return rounded((open_ * x.astype(jnp.float32)).astype(x.dtype))


def head_logits(x: Float[Array, "M K"], head: Float[Array, "V K"]) -> Float[Array, "M V"]:
    def product(rows):
        return jnp.einsum(
            "MK,VK->MV", rows, head, precision="highest", preferred_element_type=jnp.float32
        )

    return by_tiles(x, product)


def head_argmax(x: Float[Array, "M K"], head: Float[Array, "V K"]) -> Int[Array, " M"]:
    return jnp.argmax(head_logits(x, head), axis=-1).astype(jnp.int32)


def by_tiles(x: Float[Array, "M K"], product) -> Float[Array, "M N"]:
    """`product` of x's rows, TILE of them at a time."""
    rows = len(x)
    tiles = -(-rows // TILE)
    padded = rounded(jnp.pad(x, ((0, tiles * TILE - rows), (0, 0))))
    if tiles == 1:
        return rounded(product(padded))[:rows]
    out = rounded(lax.map(product, padded.reshape(tiles, TILE, -1)))
    return out.reshape(tiles * TILE, -1)[:rows]
