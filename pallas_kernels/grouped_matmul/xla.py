"""The grouped GEMMs as XLA compiles `ragged_dot` for any device."""

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts, halves


def grouped_matmul(
    x: Float[Array, "R K"], w: Float[Array, "E K N"], sizes: Int[Array, " E"]
) -> Float[Array, "R N"]:
    return lax.ragged_dot(x, w, sizes, precision="highest")


def grouped_gate_up(
    x: Float[Array, "R K"],
    w: Float[Array, "E K FF"],
    sizes: Int[Array, " E"],
    firsts: Firsts | None = None,
) -> Float[Array, "R F"]:
    gate, up = halves(grouped_matmul(x, w, sizes), firsts)
    return jax.nn.silu(gate) * up
