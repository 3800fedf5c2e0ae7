"""The cases of scripts/bench_kernels.py: every op at its real shapes by every backend.

A new op is one function here, which makes a Case of a shape or raises ValueError with the reason
why there is none, and one line in OPS.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash.bench.kernel_times import Case, Missing, Where, normal, relative_error
from jflash.bench.layer_case import layer_case
from pallas_kernels import block_attention as attention_op
from pallas_kernels import grouped_matmul, matmul
from pallas_kernels.block_attention import block_attention
from pallas_kernels.choice import check
from pallas_kernels.shapes import (
    BLOCK_ATTENTION,
    GROUPED_MATMUL,
    LAYER,
    MATMUL,
    BlockShape,
    GroupedShape,
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
    x = normal(0, (M, K), dtype)

    def error(inputs: tuple[Array]) -> float:
        got, want = (jax.jit(f)(x, *inputs) for f in (run, reference))
        if op == "head_argmax":  # the share of rows with another id
            return float((got != want).mean())
        return relative_error(got, want)

    results = {"matmul": M * N, "gate_up": M * N // 2, "head_argmax": 0}[op]
    return Case(
        where,
        calls={backend: lambda x, _, w: _chained(x, run(x, w))},
        x=x,
        numbers=(),
        make_inputs=lambda i: (normal(i + 1, weights, dtype, K**-0.5),),
        bytes=(M * K + K * N + results) * jnp.dtype(dtype).itemsize,
        error=error,
    )


def grouped_case(where: Where, shape: GroupedShape) -> Case:
    """Grouped products. Every token draws experts; only experts with rows are read."""
    _, _, dtype, backend = where
    op, M, k, E, K, N = shape
    plain = op == "grouped_matmul"
    run, reference = _both(getattr(grouped_matmul, op), backend)
    sizes = grouped_matmul.Sizes(N if plain else K, K if plain else N // 2, dtype)
    check("grouped matmul", grouped_matmul, backend, [sizes], jax.devices()[0])
    arrays = (((M * k, K), dtype), ((E, K, N), dtype), ((E,), "int32"))
    jax.eval_shape(run, *(jax.ShapeDtypeStruct(*array) for array in arrays))
    odds = np.random.default_rng(0).random((M, E))
    counts = np.bincount(np.argsort(odds)[:, :k].ravel(), minlength=E)
    x, rows = normal(0, (M * k, K), dtype), jnp.asarray(counts, jnp.int32)
    results = M * k * (N if plain else N // 2)
    entries = M * k * K + int((counts > 0).sum()) * K * N + results
    return Case(
        where,
        calls={backend: lambda x, numbers, w: _chained(x, run(x, w, *numbers))},
        x=x,
        numbers=(rows,),
        make_inputs=lambda i: (normal(i + 1, (E, K, N), dtype, K**-0.5),),
        bytes=entries * jnp.dtype(dtype).itemsize,
        error=lambda w: relative_error(*(jax.jit(f)(x, *w, rows) for f in (run, reference))),
    )


def _both(op: Callable[..., Array], backend: str) -> tuple[Callable[..., Array], ...]:
    """The op by the backend and by its reference."""
    return tuple(functools.partial(op, backend=name) for name in (backend, "reference"))


def _chained(x: Array, result: Array) -> Array:
    """The next x: it depends on the result, by a small kernel of ours."""
    first = jnp.clip(result.ravel()[0].astype(jnp.float32), -1, 1)
    return x.at[0, 0].set(first.astype(x.dtype))


OPS: dict[str, Op] = {
    "block_attention": Op(
        BLOCK_ATTENTION, ("mosaic_gpu", "triton", "xla", "flash-attn3"), attention_case
    ),
    "matmul": Op(MATMUL, ("canonical", "tuned", "mosaic_gpu", "xla"), matmul_case),
    "layer": Op(LAYER, ("canonical", "tuned", "xla"), layer_case),
    "grouped_matmul": Op(GROUPED_MATMUL, ("triton", "xla"), grouped_case),
}
