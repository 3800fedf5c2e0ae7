"""A weight kept as codes with scales, and what it stands for: W = (code − zero)·scale.

The product is multiplied in float32 and rounded once to the rows' dtype, and products with W are
those with that array: a kept weight and one that was dequantised before give the same bits.
Axes: K summed over, N columns, G groups of neighbouring K that share a column's scale. Experts have
an axis before these, which every field then has.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

MIDDLE = 8  # the zero of four bits without stored zeros


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "zeros"],
    meta_fields=["group"],
)
@dataclass(frozen=True)
class Quantised:
    """Codes of float8_e4m3fn [K, N], or of four bits: two in a byte [K / 2, N], the even K low.

    Numbers of MXFP4 are numbers of float8 too, and its scales are powers of two: they lie in this
    form without rounding.

    In a kernel the fields are references, and of an abstract weight they are shapes and dtypes.
    """

    codes: Any
    scales: Any  # [G, N], floats
    zeros: Any  # [G, N], uint8, or None
    group: int

    @property
    def packed(self) -> bool:
        return self.codes.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight [K, N], or of all experts' [E, K, N]."""
        *lead, rows, columns = self.codes.shape
        return *lead, (2 * rows if self.packed else rows), columns

    def of_expert(self, expert: Int[Array, ""]) -> "Quantised":
        """One expert's weight."""
        return jax.tree.map(lambda part: part[expert], self)


def dequantised(w: Quantised, dtype: DTypeLike) -> Float[Array, "*E K N"]:
    """The weight as an array of `dtype`.

    On a CPU XLA takes numbers below 2^-126 as zeros, here as in every product.
    """
    shape, codes = w.shape, w.codes
    K = shape[-2]
    if w.packed:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-2).reshape(shape)
    wide = codes.astype(jnp.float32)
    if w.packed:
        zeros = MIDDLE if w.zeros is None else _by_row(w.zeros, w.group, K)
        wide = wide - zeros
    wide = wide * _by_row(w.scales, w.group, K)
    if jnp.dtype(dtype) == jnp.bfloat16:  # XLA may take back a mere conversion
        wide = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    return lax.optimization_barrier(wide.astype(dtype))


def dequantised_for(w: Quantised, x: Float[Array, "M K"]) -> Float[Array, "*E K N"]:
    """The weight as an array of x's dtype, made when x is there, for one product.

    XLA would else make the arrays of all layers once, before a loop over steps, or at the step's
    beginning, and hold them all. So the array is the result of a branch that x decides: every x
    takes it but one whose first number has the bits of a NaN that no sum gives.
    """
    bits = lax.bitcast_convert_type(x[0, 0], jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
    never = 0x7FA1 if x.dtype.itemsize == 2 else 0x7FA00001
    missing = functools.partial(jnp.full, w.shape, jnp.nan, x.dtype)
    return lax.cond(bits != never, lambda: dequantised(w, x.dtype), missing)


def _by_row(groups: Array, group: int, rows: int) -> Float[Array, "*E K N"]:
    """Each group's numbers in all of its rows; the last group may be shorter."""
    return jnp.repeat(groups.astype(jnp.float32), group, axis=-2)[..., :rows, :]
