"""A sum over chunks that makes the gradient of each chunk together with its value.

It serves losses on a head's logits: the logits of all blocks of a batch would fill the device
several times over. This file knows no model.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

# fn(hidden_i, rest_i, shared, *learnt) -> (sum_i, extras_i)
ChunkFn = Callable[..., tuple[Array, Any]]


def sum_over_chunks(
    fn: ChunkFn, hidden: Array, rest: Any, shared: Any, *learnt: Any
) -> tuple[Array, Any]:
    """Σ_i fn(hidden[i], rest[i], shared, …), and the extras of all chunks on axis 0.

    Only `hidden` and `learnt` have gradients. The forward pass keeps nothing but these, and no
    chunk is computed twice. The gradients of `learnt`, parameters that all chunks share, are summed
    in float32.
    """
    return cast(tuple[Array, Any], _summed(fn, hidden, rest, shared, learnt))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(fn: ChunkFn, hidden: Array, rest: Any, shared: Any, learnt: tuple):
    values, extras = jax.lax.map(lambda x: fn(x[0], x[1], shared, *learnt), (hidden, rest))
    return jnp.sum(values), extras


def _forward(fn: ChunkFn, hidden: Array, rest: Any, shared: Any, learnt: tuple):
    of = (0, *range(3, 3 + len(learnt)))

    def one(sums, chunk):
        (value, extras), gradient = jax.value_and_grad(fn, of, has_aux=True)(
            *chunk, shared, *learnt
        )
        return jax.tree.map(jnp.add, sums, gradient[1:]), (value, extras, gradient[0])

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), learnt)
    sums, (values, extras, gradients) = jax.lax.scan(one, zeros, (hidden, rest))
    sums = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, learnt)
    return (jnp.sum(values), extras), (gradients, sums)


def _backward(fn: ChunkFn, gradients: tuple[Array, tuple], cotangents: tuple[Array, Any]):
    hidden, learnt = jax.tree.map(
        lambda x: (x.astype(jnp.float32) * cotangents[0]).astype(x.dtype), gradients
    )
    return hidden, None, None, learnt


_summed.defvjp(_forward, _backward)


def chunk(x: Array, count: int) -> Array:
    """[B, A, …] as [count, B, A / count, …]: every chunk holds all rows, as devices share them."""
    parts = x.reshape(x.shape[0], count, -1, *x.shape[2:])
    return jnp.moveaxis(parts, 1, 0)


def unchunk(x: Array) -> Array:
    """[count, B, A / count, …] back as [B, A, …]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
