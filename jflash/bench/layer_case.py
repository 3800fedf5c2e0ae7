"""A layer's four products as a step has them: chained, with norms between and nothing else.

What a product gains by itself it may lose to the kernels around it, so backends are chosen by this.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash.bench.kernel_times import Case, Missing
from pallas_kernels import matmul as op
from pallas_kernels.choice import check
from pallas_kernels.shapes import LAYER, LayerShape


def layer_case(name: str, dtype: str, backend: str) -> Case | Missing:
    """The products by one backend, each layer's result the next one's input."""
    shape = LAYER[name]
    try:
        check("matmul", op, backend, [op.Sizes(dtype)], jax.devices()[0])
    except ValueError as why:
        return Missing("layer", name, dtype, backend, str(why))
    return make_layer_case(name, shape, dtype, backend)


def make_layer_case(name: str, shape: LayerShape, dtype: str, backend: str) -> Case:
    """The case of a shape; its error is of the whole layer's result."""
    M, D, A, Q, F = shape
    sizes = ((D, Q), (A, D), (D, 2 * F), (F, D))
    x = _normal(0, (M, D), dtype, 1.0)
    run = functools.partial(_layer, backend=backend)

    def error(weights: tuple[Array, ...]) -> float:
        reference = functools.partial(_layer, backend="reference")
        got, want = (np.asarray(jax.jit(f)(x, *weights), np.float32) for f in (run, reference))
        return float(np.abs(got - want).max() / np.abs(want).max())

    entries = sum(K * N for K, N in sizes) + M * (Q + A + 5 * D + 2 * F)
    return Case(
        op="layer",
        shape=name,
        dtype=dtype,
        backend=backend,
        calls={backend: lambda x, _, *weights: run(x, *weights)},
        x=x,
        numbers=(),
        make_inputs=lambda i: tuple(
            _normal(4 * i + j + 1, size, dtype, size[0] ** -0.5) for j, size in enumerate(sizes)
        ),
        bytes=entries * jnp.dtype(dtype).itemsize,
        error=error,
    )


def _layer(x: Array, qkv: Array, out: Array, gate_up: Array, down: Array, *, backend: str) -> Array:
    """The next layer's x, normed so that no chain of them grows."""
    pieces = op.partial_products(_norm(x), qkv, backend=backend)
    # As the kernel that cuts heads adds them.
    total = functools.reduce(jnp.add, list(pieces))[: len(x)].astype(x.dtype)
    x = op.matmul(total[:, : out.shape[0]], out, x, backend=backend)
    inner = op.gate_up(_norm(x), gate_up, backend=backend)
    return _norm(op.matmul(inner, down, x, backend=backend))


def _norm(x: Float[Array, "M D"]) -> Float[Array, "M D"]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(seed, shape: tuple[int, ...], dtype: str, scale: float) -> Array:
    key = jax.random.key(seed, impl="rbg")
    return (scale * jax.random.normal(key, shape)).astype(dtype)
