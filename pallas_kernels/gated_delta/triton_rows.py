"""Rows of an array in Pallas-Triton: how a program reads and writes some of them."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

ROWS = 16  # of a program at most
ROWS_OF_A_WARP = 4


def rows_of(count: int) -> int:
    """Rows of a program of a call of `count` rows; their number changed no bit on an H200."""
    return min(ROWS, 1 << (count - 1).bit_length())


def warps_of(rows: int) -> plt.CompilerParams:
    return plt.CompilerParams(num_warps=pl.cdiv(rows, ROWS_OF_A_WARP), num_stages=1)


def at(ref, *index):
    """The entries of an array's axes, each an integer or a vector: two vectors at most."""
    vectors = [i for i in index if jnp.ndim(i)]
    shape = tuple(v.size for v in vectors)
    made, axis = [], 0
    for i in index:
        if jnp.ndim(i):
            i = jnp.expand_dims(i, [a for a in range(len(shape)) if a != axis])
            axis += 1
        made.append(jnp.broadcast_to(i, shape))
    return ref.at[tuple(made)]


def read(ref, mask, *index):
    """`at`, where `mask` holds along the first vector, and zeros elsewhere."""
    where = at(ref, *index)
    shape = tuple(i.size for i in index if jnp.ndim(i))
    mask = jnp.broadcast_to(mask.reshape(-1, *[1] * (len(shape) - 1)), shape)
    return plt.load(where, mask=mask, other=0.0)


def write(ref, value, mask, *index):
    mask = jnp.broadcast_to(mask.reshape(-1, *[1] * (value.ndim - 1)), value.shape)
    plt.store(at(ref, *index), value.astype(ref.dtype), mask=mask)


def squares(x, exact: bool):
    """x · x, which no compiler joins with the sum that follows: whether it would hangs on which
    thread has a neighbour. An interpreter has no such operation."""
    if exact:
        return x * x
    (squares,) = plt.elementwise_inline_asm(
        "mul.rn.f32 $0, $1, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return squares
