"""The cases of scripts/bench_kernels.py: every op at its real shapes by every backend.

A new op is one function here, which makes a Case of a shape or raises ValueError with the reason
why there is none, and one line in OPS.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jflash.bench.kernels.delta import delta_case
from jflash.bench.kernels.times import Case, Missing, Where, normal, relative_error
from pallas_kernels import block_attention as attention_op
from pallas_kernels import grouped_matmul, matmul
from pallas_kernels.block_attention import block_attention
from pallas_kernels.choice import check
from pallas_kernels.shapes import (
    BLOCK_ATTENTION,
    GATED_DELTA,
    GROUPED_MATMUL,
    LAYER,
    MATMUL,
    BlockShape,
    GroupedShape,
    LayerShape,
    MatmulShape,
)

SPLITS = (1, 4, 8, 16, 32)  # of the KV axis, that flash-attn3 leaves to its caller


class Op(NamedTuple):
    """An op: its shapes by name, the backends that are timed by default, and its cases."""

    shapes: dict[str, Any]
    backends: tuple[str, ...]
    make: Callable[[Where, Any], Case]


def make_case(op: str, name: str, dtype: str, backend: str) -> Case | Missing:
    """The case of an op's shape, or why the backend cannot do it here."""
    where = (op, name, dtype, backend)
    try:
        return OPS[op].make(where, OPS[op].shapes[name])
    except ValueError as why:
        return Missing(where, str(why))


def attention_case(where: Where, shape: BlockShape) -> Case:
    """Block attention in the middle of a text; no row of the block is padding."""
    return make_attention_case(where, shape, attention_calls(shape, *where[2:]))


def attention_calls(shape: BlockShape, dtype: str, backend: str) -> dict[str, Callable]:
    """The backend as f(q, (lengths, widths), k, v), by name. ValueError: not here, and why."""
    if backend == "flash-attn3":
        return flash_attn3_calls(shape, dtype)
    sizes = attention_op.Sizes(shape.T, shape.N // shape.K, shape.H, dtype)
    check("attention", attention_op, backend, [sizes], jax.devices()[0])
    attend = _attention(shape, backend)
    return {backend: lambda q, numbers, k, v: attend(q, k, v, *numbers)}


def _attention(shape: BlockShape, backend: str) -> Callable[..., Array]:
    return functools.partial(
        block_attention, causal=shape.causal, window=shape.window, softcap=shape.softcap,
        sinks=normal(9, (shape.N,), "float32") if shape.sinks else None, scale=shape.H**-0.5,
        backend=backend,
    )  # fmt: skip


def flash_attn3_calls(shape: BlockShape, dtype: str) -> dict[str, Callable]:
    """flash-attn3-jax, if it is installed and can do what the shape needs; one call a split."""
    if importlib.util.find_spec("flash_attn3_jax") is None:
        raise ValueError("not installed")
    if shape.sinks or shape.softcap is not None or dtype != "bfloat16":
        raise ValueError("has no sinks, soft cap or float32")
    from flash_attn3_jax import flash_mha_with_kvcache  # pyright: ignore[reportMissingImports]

    reach = -1 if shape.window is None else shape.window - 1

    def call(splits, q, numbers, k, v):
        lengths, widths = numbers
        return flash_mha_with_kvcache(
            q, k, v, cache_seqlens=lengths + widths, softmax_scale=shape.H**-0.5,
            is_causal=shape.causal, window_size=(reach, 0 if shape.causal else reach),
            num_splits=splits,
        )  # fmt: skip

    return {f"{splits} splits": functools.partial(call, splits) for splits in SPLITS}


def make_attention_case(where: Where, shape: BlockShape, calls: dict[str, Callable]) -> Case:
    """The case of these calls; its error is relative to a row's largest entry, the worst row's."""
    dtype = where[2]
    B, T, S, N, K, H = shape[:6]
    lengths, widths = jnp.full(B, shape.context, jnp.int32), jnp.full(B, T, jnp.int32)
    q = normal(0, (B, T, N, H), dtype)
    reference = jax.jit(_attention(shape, "reference"))

    def error(inputs: tuple[Array, Array]) -> float:
        call = jax.jit(next(iter(calls.values())))
        got = np.asarray(call(q, (lengths, widths), *inputs), np.float32)
        worst = 0.0
        for b in range(B):  # all at once would not fit the memory
            one = [x[b : b + 1].astype(jnp.float32) for x in (q, *inputs)]
            want = np.asarray(reference(*one, lengths[b : b + 1], widths[b : b + 1]))[0]
            largest = np.abs(want).max(axis=-1, keepdims=True)
            worst = max(worst, float((np.abs(got[b] - want) / largest).max()))
        return worst

    seen = shape.context + T
    if shape.window is not None:  # by the first and the last row together
        seen = min(seen, shape.window + T - 1)
    entries = B * (2 * seen * K * H + 2 * T * N * H)
    return Case(
        where,
        calls=calls,
        x=q,
        numbers=(lengths, widths),
        make_inputs=lambda i: tuple(normal(2 * i + s, (B, S, K, H), dtype) for s in (1, 2)),
        bytes=entries * jnp.dtype(dtype).itemsize,
        error=error,
    )


def matmul_case(where: Where, shape: MatmulShape) -> Case:
    """A GEMM and what follows it."""
    _, _, dtype, backend = where
    op, M, K, N = shape
    weights = (N, K) if op == "head_argmax" else (K, N)
    run, reference = _both(getattr(matmul, op), backend)
    check("matmul", matmul, backend, [matmul.Sizes(dtype)], jax.devices()[0])
    jax.eval_shape(run, *(jax.ShapeDtypeStruct(size, dtype) for size in ((M, K), weights)))
    results = {"matmul": M * N, "gate_up": M * N // 2, "head_argmax": 0}[op]
    # Of ids the error is the share of rows with another one.
    error = (lambda a, b: float((a != b).mean())) if op == "head_argmax" else relative_error
    entries = M * K + K * N + results
    return _case(where, run, reference, (M, K), [(weights, K**-0.5)], entries, error=error)


def grouped_case(where: Where, shape: GroupedShape) -> Case:
    """Grouped products. Every token draws experts; only experts with rows are read."""
    _, _, dtype, backend = where
    op, M, k, E, K, N = shape
    plain = op == "grouped_matmul"
    run, reference = _both(getattr(grouped_matmul, op), backend)
    sizes = grouped_matmul.Sizes(K, N if plain else N // 2, dtype)
    check("grouped matmul", grouped_matmul, backend, [sizes], jax.devices()[0])
    arrays = (((M * k, K), dtype), ((E, K, N), dtype), ((E,), "int32"))
    jax.eval_shape(run, *(jax.ShapeDtypeStruct(*array) for array in arrays))
    odds = np.random.default_rng(0).random((M, E))
    counts = np.bincount(np.argsort(odds)[:, :k].ravel(), minlength=E)
    results = M * k * (N if plain else N // 2)
    entries = M * k * K + int((counts > 0).sum()) * K * N + results
    rows, weights = jnp.asarray(counts, jnp.int32), [((E, K, N), K**-0.5)]
    return _case(where, run, reference, (M * k, K), weights, entries, numbers=(rows,))


def layer_case(where: Where, shape: LayerShape) -> Case:
    """A layer's four products as a step has them: chained, with norms between and nothing else.

    A product may lose to the kernels around it what it gains by itself, so this case chooses
    backends. Each layer's result is the next one's input; the error is that of the whole layer's.
    """
    _, _, dtype, backend = where
    check("matmul", matmul, backend, [matmul.Sizes(dtype)], jax.devices()[0])
    M, D, A, Q, F = shape
    sizes = ((D, Q), (A, D), (D, 2 * F), (F, D))
    entries = sum(K * N for K, N in sizes) + M * (Q + A + 5 * D + 2 * F)
    weights = [(size, size[0] ** -0.5) for size in sizes]
    run, reference = _both(_layer, backend)
    return _case(where, run, reference, (M, D), weights, entries, chain=lambda _, x: x)


def _layer(x: Array, qkv: Array, out: Array, gate_up: Array, down: Array, *, backend: str) -> Array:
    """The next layer's x, normed so that no chain of them grows."""
    pieces = matmul.partial_products(_norm(x), qkv, backend=backend)
    # The kernel that cuts heads adds the pieces in this way.
    total = functools.reduce(jnp.add, list(pieces))[: len(x)].astype(x.dtype)
    x = matmul.matmul(total[:, : out.shape[0]], out, x, backend=backend)
    inner = matmul.gate_up(_norm(x), gate_up, backend=backend)
    return _norm(matmul.matmul(inner, down, x, backend=backend))


def _norm(x: Float[Array, "M D"]) -> Float[Array, "M D"]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def _both(op: Callable[..., Array], backend: str) -> tuple[Callable[..., Array], ...]:
    """The op by the backend and by its reference."""
    return tuple(functools.partial(op, backend=name) for name in (backend, "reference"))


def _chained(x: Array, result: Array) -> Array:
    """The next x: it depends on the result, by a small kernel of ours."""
    first = jnp.clip(result.ravel()[0].astype(jnp.float32), -1, 1)
    return x.at[0, 0].set(first.astype(x.dtype))


def _case(
    where: Where,
    run: Callable[..., Array],
    reference: Callable[..., Array],
    size: tuple[int, int],
    weights: Sequence[tuple[tuple[int, ...], float]],
    entries: int,
    *,
    numbers: tuple[Array, ...] = (),
    chain: Callable[[Array, Array], Array] = _chained,
    error: Callable[[Array, Array], float] = relative_error,
) -> Case:
    """The case of run(x, *weights, *numbers): x by its size, weights by theirs and their scales."""
    _, _, dtype, backend = where
    x, many = normal(0, size, dtype), len(weights)
    return Case(
        where,
        calls={backend: lambda x, numbers, *w: chain(x, run(x, *w, *numbers))},
        x=x,
        numbers=numbers,
        make_inputs=lambda i: tuple(
            normal(many * i + j, shape, dtype, scale)
            for j, (shape, scale) in enumerate(weights, start=1)
        ),
        bytes=entries * jnp.dtype(dtype).itemsize,
        error=lambda w: error(*(jax.jit(f)(x, *w, *numbers) for f in (run, reference))),
    )


OPS: dict[str, Op] = {
    "block_attention": Op(
        BLOCK_ATTENTION, ("mosaic_gpu", "triton", "xla", "flash-attn3"), attention_case
    ),
    "matmul": Op(MATMUL, ("canonical", "xla"), matmul_case),
    "layer": Op(LAYER, ("canonical", "xla"), layer_case),
    "grouped_matmul": Op(GROUPED_MATMUL, ("triton", "xla"), grouped_case),
    "gated_delta": Op(GATED_DELTA, ("mosaic_gpu", "triton", "xla"), delta_case),
}
