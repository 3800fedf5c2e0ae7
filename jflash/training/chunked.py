"""A sum over chunks, whose gradient is made while each chunk's values are still there.

For losses behind a head: the logits of all blocks of a batch would fill the device several times
over. Knows no model.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

# fn(hidden_i, rest_i, shared) -> (sum_i, extras_i)
ChunkFn = Callable[[Array, Any, Any], tuple[Array, Any]]


def sum_over_chunks(fn: ChunkFn, hidden: Array, rest: Any, shared: Any) -> tuple[Array, Any]:
    """Σ_i fn(hidden[i], rest[i], shared) and the extras, stacked: axis 0 is that of the chunks.

    Differentiable in `hidden` alone; its gradient, as large as itself, is what is kept between the
    two passes, so no chunk is computed twice.
    """
    return cast(tuple[Array, Any], _summed(fn, hidden, rest, shared))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(fn: ChunkFn, hidden: Array, rest: Any, shared: Any):
    values, extras = jax.lax.map(lambda x: fn(x[0], x[1], shared), (hidden, rest))
    return jnp.sum(values), extras


def _forward(fn: ChunkFn, hidden: Array, rest: Any, shared: Any):
    def one(chunk):
        (value, extras), gradient = jax.value_and_grad(fn, has_aux=True)(*chunk, shared)
        return value, extras, gradient

    values, extras, gradients = jax.lax.map(one, (hidden, rest))
    return (jnp.sum(values), extras), gradients


def _backward(fn: ChunkFn, gradients: Array, cotangents: tuple[Array, Any]):
    scaled = gradients.astype(jnp.float32) * cotangents[0]
    return scaled.astype(gradients.dtype), None, None


_summed.defvjp(_forward, _backward)


def chunk(x: Array, count: int) -> Array:
    """[B, A, …] as [count, B, A / count, …]: every chunk holds all rows, as devices share them."""
    parts = x.reshape(x.shape[0], count, -1, *x.shape[2:])
    return jnp.moveaxis(parts, 1, 0)


def unchunk(x: Array) -> Array:
    """[count, B, A / count, …] back as [B, A, …]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
