"""The grouped GEMMs on a CPU: fixed tiles of rows, each of one expert, by matmul's product.

An expert's rows are cut into tiles, the last one filled up with zeros: so a row's bits are the same
however many rows there are and wherever it lies. Experts without rows cost nothing. A kept expert
is dequantised for each of its tiles.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.fixed_order import rounded, row_sum
from pallas_kernels.grouped_matmul.reference import ALPHA, LIMIT
from pallas_kernels.halves import Firsts, halves
from pallas_kernels.matmul.cpu import TILE, silu_times
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised


def grouped_matmul(
    x: Float[Array, "R K"], w: Float[Array, "E K N"] | Quantised, sizes: Int[Array, " E"]
) -> Float[Array, "R N"]:
    rows, columns = len(x), w.shape[2]
    ends, tiles = jnp.cumsum(sizes), -(-sizes // TILE)
    last_tiles = jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, TILE), (0, 0)))  # a tile may begin at any row

    def one_tile(i, out):
        expert = jnp.sum(i >= last_tiles)
        first = ends[expert] - sizes[expert] + (i - last_tiles[expert] + tiles[expert]) * TILE
        place = first + jnp.arange(TILE)
        inside = place < ends[expert]
        tile = lax.dynamic_slice_in_dim(padded, first, TILE)
        tile = jnp.where(inside[:, None], tile, 0)
        own = dequantised(w.of_expert(expert), x.dtype) if isinstance(w, Quantised) else w[expert]
        product = rounded(jnp.matmul(*rounded((tile, own)), precision="highest"))
        # What is beyond the expert's rows goes past the end, each row to a different place.
        place = jnp.where(inside, place, rows + jnp.arange(TILE))
        return out.at[place].set(product, mode="drop", unique_indices=True)

    out = jnp.zeros((rows, columns), x.dtype)
    return lax.fori_loop(0, last_tiles[-1], one_tile, out)


def grouped_gate_up(
    x: Float[Array, "R K"],
    w: Float[Array, "E K FF"] | Quantised,
    sizes: Int[Array, " E"],
    firsts: Firsts | None = None,
) -> Float[Array, "R F"]:
    return silu_times(*halves(grouped_matmul(x, w, sizes), firsts))


def clamped_gate(gate: Float[Array, "R F"], up: Float[Array, "R F"]) -> Float[Array, "R F"]:
    open_ = jnp.minimum(gate.astype(jnp.float32), LIMIT)
    bounded = rounded(jnp.clip(up.astype(jnp.float32), -LIMIT, LIMIT) + 1)
    open_ *= jax.nn.sigmoid(rounded(ALPHA * open_))
    return rounded((bounded * open_).astype(gate.dtype))


def probabilities(logits: Float[Array, "M E"]) -> Float[Array, "M E"]:
    wide = logits.astype(jnp.float32)
    weights = rounded(jnp.exp(rounded(wide - jnp.max(wide, axis=-1, keepdims=True))))
    return weights / row_sum(weights)


def sigmoids(logits: Float[Array, "M E"]) -> Float[Array, "M E"]:
    return rounded(jax.nn.sigmoid(rounded(logits.astype(jnp.float32))))


def weighted_sum(
    outputs: Float[Array, "M k D"], weights: Float[Array, "M k"]
) -> Float[Array, "M D"]:
    terms = rounded(weights[:, :, None] * outputs.astype(jnp.float32))
    return functools.reduce(jnp.add, (terms[:, i] for i in range(outputs.shape[1])))
