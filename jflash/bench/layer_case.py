"""A layer's four products as a step has them: chained, with norms between and nothing else.

A product may lose to the kernels around it what it gains by itself, so this case chooses backends.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash.bench.kernel_times import Case, Where, normal, relative_error
from pallas_kernels import matmul as op
from pallas_kernels.choice import check
from pallas_kernels.shapes import LayerShape


def layer_case(where: Where, shape: LayerShape) -> Case:
    """The products by one backend, each layer's result the next one's input.

    The error is that of the whole layer's result. ValueError for a backend that cannot run here.
    """
    _, _, dtype, backend = where
    check("matmul", op, backend, [op.Sizes(dtype)], jax.devices()[0])
    M, D, A, Q, F = shape
    sizes = ((D, Q), (A, D), (D, 2 * F), (F, D))
    x = normal(0, (M, D), dtype)
    run = functools.partial(_layer, backend=backend)
    reference = functools.partial(_layer, backend="reference")
    entries = sum(K * N for K, N in sizes) + M * (Q + A + 5 * D + 2 * F)
    return Case(
        where,
        calls={backend: lambda x, _, *weights: run(x, *weights)},
        x=x,
        numbers=(),
        make_inputs=lambda i: tuple(
            normal(4 * i + j + 1, size, dtype, size[0] ** -0.5) for j, size in enumerate(sizes)
        ),
        bytes=entries * jnp.dtype(dtype).itemsize,
        error=lambda weights: relative_error(*(jax.jit(f)(x, *weights) for f in (run, reference))),
    )


def _layer(x: Array, qkv: Array, out: Array, gate_up: Array, down: Array, *, backend: str) -> Array:
    """The next layer's x, normed so that no chain of them grows."""
    pieces = op.partial_products(_norm(x), qkv, backend=backend)
    # The kernel that cuts heads adds the pieces in this way.
    total = functools.reduce(jnp.add, list(pieces))[: len(x)].astype(x.dtype)
    x = op.matmul(total[:, : out.shape[0]], out, x, backend=backend)
    inner = op.gate_up(_norm(x), gate_up, backend=backend)
    return _norm(op.matmul(inner, down, x, backend=backend))


def _norm(x: Float[Array, "M D"]) -> Float[Array, "M D"]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype)
