"""What a product leaves unsummed, and a Pallas-Triton kernel that adds it: by entry, ascending.

Where a norm follows, `rms_norm.after` does both in one kernel.

This is a kernel because XLA would leave a sum unrounded before the next one, and would compute a
layer's residual again from the pieces of all layers before it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float

MOST_COLUMNS = 512


class Unsummed(NamedTuple):
    """A product and what it is added to, as far as the product's kernel came.

    The sum is `summed`'s: the residual, plus the pieces' sum rounded to bfloat16. Without pieces
    the residual is the whole result.
    """

    pieces: Float[Array, "P *lead D"] | None  # float32, or one that is rounded already
    residual: Float[Array, "*lead D"] | None


def summed(sums: Unsummed, *, interpret: bool = False) -> Float[Array, "*lead D"]:
    """The sum itself."""
    pieces, residual = sums
    if pieces is None:
        assert residual is not None
        return residual
    width, lead = pieces.shape[-1], pieces.shape[1:-1]
    if residual is not None:
        residual = residual.reshape(-1, width)
    flat = pieces.reshape(len(pieces), -1, width)
    out = add_pieces(flat, residual, dtype=jnp.bfloat16, interpret=interpret)
    return out.reshape(*lead, width)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def add_pieces(
    sums: Float[Array, "P M N"],
    residual: Float[Array, "M N"] | None,
    *,
    dtype: DTypeLike,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """The sum rounded to `dtype`; with a residual rounded again after it."""
    _, M, N = sums.shape
    columns = next(c for c in (MOST_COLUMNS >> i for i in range(10)) if N % c == 0)
    return pl.pallas_call(
        functools.partial(_kernel, columns=columns),
        name="add_pieces",
        grid=(N // columns, M),
        out_shape=jax.ShapeDtypeStruct((M, N), dtype),
        compiler_params=plt.CompilerParams(num_warps=max(1, columns // 128), num_stages=1),
        interpret=interpret,
    )(sums, *([] if residual is None else [residual]))


def _kernel(sums_ref, *rest, columns: int):
    *residual, out_ref = rest
    at = (
        jnp.full((columns,), pl.program_id(1)),
        pl.program_id(0) * columns + jnp.arange(columns),
    )
    numbers = (jnp.full((columns,), p) for p in range(sums_ref.shape[0]))
    pieces = (plt.load(sums_ref.at[(number, *at)]) for number in numbers)
    total = functools.reduce(jnp.add, pieces).astype(out_ref.dtype)
    if residual:
        before = plt.load(residual[0].at[at]).astype(jnp.float32)
        total = (before + total.astype(jnp.float32)).astype(out_ref.dtype)
    plt.store(out_ref.at[at], total)
