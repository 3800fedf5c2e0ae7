"""What scripts/bench_kernels.py can time: every op at its real shapes by every backend.

A new op is one function here, from a shape's name, a dtype and a backend to a Case or Missing, and
one line in OPS. Random inputs throughout: a chip is faster on zeros.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash.bench.kernel_times import Case, Missing
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
    case: Callable[[str, str, str], Case | Missing]


def attention_case(name: str, dtype: str, backend: str) -> Case | Missing:
    """Block attention in the middle of a text; no row of the block is padding."""
    shape = BLOCK_ATTENTION[name]
    try:
        calls = attention_calls(shape, dtype, backend)
    except ValueError as why:
        return Missing("block_attention", name, dtype, backend, str(why))
    return make_attention_case(name, shape, dtype, backend, calls)


def attention_calls(shape: BlockShape, dtype: str, backend: str) -> dict[str, Callable]:
    """The backend as f(q, (lengths, widths), k, v), by name. ValueError: not here, and why."""
    options = {"causal": shape.causal, "window": shape.window, "softcap": shape.softcap}
    if backend == "flash-attn3":
        return flash_attn3_calls(shape, dtype)
    sizes = attention_op.Sizes(shape.T, shape.N // shape.K, shape.H, dtype)
    check("attention", attention_op, backend, [sizes], jax.devices()[0])
    attend = functools.partial(
        block_attention, scale=shape.H**-0.5, sinks=_sinks(shape), backend=backend, **options
    )
    return {backend: lambda q, numbers, k, v: attend(q, k, v, *numbers)}


def flash_attn3_calls(shape: BlockShape, dtype: str) -> dict[str, Callable]:
    """flash-attn3-jax, if it is installed and has what the shape asks for; one call a split."""
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


def make_attention_case(
    name: str, shape: BlockShape, dtype: str, backend: str, calls: dict[str, Callable]
) -> Case:
    """The case of these calls; its error is of a row's largest entry, the worst of all rows."""
    B, T, S, N, K, H = shape[:6]
    lengths, widths = jnp.full(B, shape.context, jnp.int32), jnp.full(B, T, jnp.int32)
    q = _normal(0, (B, T, N, H), dtype)
    reference = jax.jit(
        functools.partial(
            block_attention, causal=shape.causal, window=shape.window, softcap=shape.softcap,
            sinks=_sinks(shape), scale=H**-0.5, backend="reference",
        )
    )  # fmt: skip

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
        op="block_attention",
        shape=name,
        dtype=dtype,
        backend=backend,
        calls=calls,
        x=q,
        numbers=(lengths, widths),
        make_inputs=lambda i: tuple(
            _normal(s, (B, S, K, H), dtype) for s in (2 * i + 1, 2 * i + 2)
        ),
        bytes=entries * jnp.dtype(dtype).itemsize,
        error=error,
    )


def matmul_case(name: str, dtype: str, backend: str) -> Case | Missing:
    """A GEMM and what follows it; a small kernel of ours passes each result on to the next call."""
    shape = MATMUL[name]
    try:
        _check_matmul(shape, dtype, backend)
    except ValueError as why:
        return Missing("matmul", name, dtype, backend, str(why))
    op, M, K, N = shape
    x = _normal(0, (M, K), dtype)
    weights = (N, K) if op == "head_argmax" else (K, N)
    run = functools.partial(getattr(matmul, op), backend=backend)
    reference = functools.partial(getattr(matmul, op), backend="reference")

    def call(x: Array, _, w: Array) -> Array:
        first = run(x, w).ravel()[0]
        return x.at[0, 0].set(jnp.clip(first.astype(jnp.float32), -1, 1).astype(x.dtype))

    def error(inputs: tuple[Array]) -> float:
        got, want = (np.asarray(jax.jit(f)(x, *inputs), np.float32) for f in (run, reference))
        if op == "head_argmax":  # the share of rows with another id
            return float((got != want).mean())
        return float(np.abs(got - want).max() / np.abs(want).max())

    results = {"matmul": M * N, "gate_up": M * N // 2, "head_argmax": 0}[op]
    return Case(
        op="matmul",
        shape=name,
        dtype=dtype,
        backend=backend,
        calls={backend: call},
        x=x,
        numbers=(),
        make_inputs=lambda i: (_normal(i + 1, weights, dtype, K**-0.5),),
        bytes=(M * K + K * N + results) * jnp.dtype(dtype).itemsize,
        error=error,
    )


def grouped_case(name: str, dtype: str, backend: str) -> Case | Missing:
    """Grouped products. Every token draws its own experts; only experts with rows are read."""
    shape = GROUPED_MATMUL[name]
    try:
        _check_grouped(shape, dtype, backend)
    except ValueError as why:
        return Missing("grouped_matmul", name, dtype, backend, str(why))
    return make_grouped_case(name, shape, dtype, backend)


def make_grouped_case(name: str, shape: GroupedShape, dtype: str, backend: str) -> Case:
    """The case of a shape; a small kernel of ours passes each result on to the next call."""
    op, M, k, E, K, N = shape
    odds = np.random.default_rng(0).random((M, E))
    sizes = np.bincount(np.argsort(odds)[:, :k].ravel(), minlength=E)
    x = _normal(0, (M * k, K), dtype)
    run = functools.partial(getattr(grouped_matmul, op), backend=backend)
    reference = functools.partial(getattr(grouped_matmul, op), backend="reference")

    def call(x: Array, sizes: tuple[Array], w: Array) -> Array:
        first = run(x, w, *sizes).ravel()[0]
        return x.at[0, 0].set(jnp.clip(first.astype(jnp.float32), -1, 1).astype(x.dtype))

    def error(inputs: tuple[Array]) -> float:
        numbers = jnp.asarray(sizes)
        got, want = (
            np.asarray(jax.jit(f)(x, *inputs, numbers), np.float32) for f in (run, reference)
        )
        return float(np.abs(got - want).max() / np.abs(want).max())

    results = M * k * (N // 2 if op == "grouped_gate_up" else N)
    entries = M * k * K + int((sizes > 0).sum()) * K * N + results
    return Case(
        op="grouped_matmul",
        shape=name,
        dtype=dtype,
        backend=backend,
        calls={backend: call},
        x=x,
        numbers=(jnp.asarray(sizes, jnp.int32),),
        make_inputs=lambda i: (_normal(i + 1, (E, K, N), dtype, K**-0.5),),
        bytes=entries * jnp.dtype(dtype).itemsize,
        error=error,
    )


def _check_grouped(shape: GroupedShape, dtype: str, backend: str) -> None:
    """ValueError for what the op would refuse later, or compile for another device."""
    inner = shape.K if shape.op == "grouped_matmul" else shape.N // 2
    sizes = grouped_matmul.Sizes(shape.N if shape.op == "grouped_matmul" else shape.K, inner, dtype)
    check("grouped matmul", grouped_matmul, backend, [sizes], jax.devices()[0])
    jax.eval_shape(
        functools.partial(getattr(grouped_matmul, shape.op), backend=backend),
        jax.ShapeDtypeStruct((shape.M * shape.k, shape.K), dtype),
        jax.ShapeDtypeStruct((shape.E, shape.K, shape.N), dtype),
        jax.ShapeDtypeStruct((shape.E,), jnp.int32),
    )


def _check_matmul(shape: MatmulShape, dtype: str, backend: str) -> None:
    """ValueError for what the op would refuse later, or compile for another GPU."""
    check("matmul", matmul, backend, [matmul.Sizes(dtype)], jax.devices()[0])
    jax.eval_shape(
        functools.partial(getattr(matmul, shape.op), backend=backend),
        jax.ShapeDtypeStruct((shape.M, shape.K), dtype),
        jax.ShapeDtypeStruct(
            (shape.N, shape.K) if shape.op == "head_argmax" else (shape.K, shape.N), dtype
        ),
    )


def _sinks(shape: BlockShape) -> Array | None:
    return _normal(9, (shape.N,), "float32") if shape.sinks else None


def _normal(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Array:
    return _scaled_normal(jax.random.key(seed, impl="rbg"), scale, shape, dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _scaled_normal(key, scale, shape, dtype):
    return (scale * jax.random.normal(key, shape)).astype(dtype)


OPS: dict[str, Op] = {
    "block_attention": Op(
        BLOCK_ATTENTION, ("mosaic_gpu", "triton", "xla", "flash-attn3"), attention_case
    ),
    "matmul": Op(MATMUL, ("canonical", "tuned", "mosaic_gpu", "xla"), matmul_case),
    "layer": Op(LAYER, ("canonical", "tuned", "xla"), layer_case),
    "grouped_matmul": Op(GROUPED_MATMUL, ("triton", "xla"), grouped_case),
}
