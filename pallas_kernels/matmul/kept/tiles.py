"""Tiles of weights in Pallas-Triton kernels, those of kept weights converted from their codes.

A step over K has rows of one group if it can: each column's scale is then loaded once and a step
ahead, because a load this small is not copied to shared memory while others are multiplied.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.grid import grid
from pallas_kernels.matmul.kept.quantised import MIDDLE, Quantised

LEAST = 16  # rows of a step
MOST = 2**31  # bytes of codes: Pallas-Triton counts up to 2^32 of them in signed 32 bits


def depth_of(w: Any, most: int) -> int:
    """Rows of K in a step: `most`, or a part of it that lies in one group."""
    if not isinstance(w, Quantised) or w.group >= w.shape[-2]:
        return most
    depth = math.gcd(w.group, most)
    return depth if depth >= LEAST else most


def load_groups(
    w_ref: Any, first: Any, depth: int, columns: Int[Array, " n"], *lead: Any
) -> tuple[Array, ...]:
    """The scale, and any zero, of each column in `depth` rows from `first` on, a multiple of it.

    Nothing for an array, or where these rows may be of two groups. `lead` is the weight's expert.
    """
    if not isinstance(w_ref, Quantised):
        return ()
    if w_ref.group % depth and w_ref.group < w_ref.shape[-2]:
        return ()
    parts = (w_ref.scales,) if w_ref.zeros is None else (w_ref.scales, w_ref.zeros)
    at = (*(jnp.full(columns.shape, i) for i in (*lead, first // w_ref.group)), columns)
    return tuple(plt.load(part.at[at]) for part in parts)


def load_tile(
    w_ref: Any,
    first: Any,
    depth: int,
    columns: Int[Array, " n"],
    groups: tuple[Array, ...],
    dtype: DTypeLike,
    *lead: Any,
) -> Float[Array, "k n"]:
    """`depth` rows of the weight from `first` on, with what `load_groups` gave for them.

    Codes become numbers as `dequantised` makes them.
    """
    k = first + jnp.arange(depth)
    if not isinstance(w_ref, Quantised):
        return plt.load(grid(w_ref, k, columns, *lead))
    if math.prod(w_ref.codes.shape) >= MOST:
        raise ValueError(f"Triton kernels read less than {MOST} codes, not {w_ref.codes.shape}")
    packed = w_ref.packed
    codes = plt.load(grid(w_ref.codes, k // 2 if packed else k, columns, *lead))
    if not groups:
        parts = (w_ref.scales,) if w_ref.zeros is None else (w_ref.scales, w_ref.zeros)
        groups = tuple(plt.load(grid(part, k // w_ref.group, columns, *lead)) for part in parts)
    else:
        groups = tuple(part[None, :] for part in groups)

    def converted(codes, scales, *zeros):
        if packed:
            less = zeros[0].astype(jnp.int32) if zeros else MIDDLE
            codes = (codes.astype(jnp.int32) >> (k % 2 * 4)[:, None] & 15) - less
        return (codes.astype(jnp.float32) * scales.astype(jnp.float32)).astype(dtype)

    # Triton would see loads of one byte before the product and sum K in another order: 16 numbers
    # at once would be 0, 1, 4, 5, 8 … It does not look into a branch, which is always taken here.
    nothing = jnp.zeros((depth, columns.size), dtype)
    return lax.cond(first >= 0, converted, lambda *_: nothing, codes, *groups)
