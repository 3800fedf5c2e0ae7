"""Weights kept as codes with scales: the same bits as those of the array that they stand for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import triton
from pallas_kernels.matmul import canonical, gate_up, matmul, partial_products
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised
from tests.support.described_gpu import H200, compile_for

K, N, FP8 = 192, 128, jnp.float8_e4m3fn


def kept(kind: str, seed: int = 0) -> Quantised:
    """FP8 in groups of 128, the last half full, or a scale a column; others in groups of 32.

    MXFP4 lies as FP8 with powers of two in bfloat16.
    """
    rng = np.random.default_rng(seed)
    group = {"fp8": 128, "fp8-column": K}.get(kind, 32)
    G = -(-K // group)
    scales = rng.uniform(0.01, 0.02, (G, N)).astype(np.float32)
    if kind == "mxfp4":
        numbers = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], (K, N)) * rng.choice([-1, 1], (K, N))
        powers = 2.0 ** rng.integers(-20, 9, (G, N))
        return Quantised(jnp.asarray(numbers, FP8), jnp.asarray(powers, jnp.bfloat16), None, group)
    if kind.startswith("fp8"):
        codes = jnp.asarray(rng.uniform(-8, 8, (K, N)), FP8)
        return Quantised(codes, jnp.asarray(scales), None, group)
    codes = jnp.asarray(rng.integers(0, 256, (K // 2, N)), jnp.uint8)
    zeros = jnp.asarray(rng.integers(0, 16, (G, N)), jnp.uint8) if kind == "int4-zeros" else None
    return Quantised(codes, jnp.asarray(scales, jnp.bfloat16), zeros, group)


def by_definition(w: Quantised) -> np.ndarray:
    """(code − zero)·scale in float32, number by number."""
    codes, scales = np.asarray(w.codes), np.asarray(w.scales).astype(np.float32)
    out = np.empty((K, N), np.float32)
    for k in range(K):
        g = k // w.group
        if w.packed:
            zero = 8 if w.zeros is None else np.asarray(w.zeros)[g].astype(np.int32)
            row = (codes[k // 2].astype(np.int32) >> 4 * (k % 2) & 15) - zero
        else:
            row = codes[k]
        out[k] = row.astype(np.float32) * scales[g]
    return out


def rows(count: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(count), (count, K), dtype)


def same(a: jax.Array, b: jax.Array) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


KINDS = ("fp8", "fp8-column", "int4", "int4-zeros", "mxfp4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_weight_stands_for_its_definition(kind):
    w, exact = kept(kind), by_definition(kept(kind))
    np.testing.assert_array_equal(jax.jit(dequantised, static_argnums=1)(w, "float32"), exact)
    same(jax.jit(dequantised, static_argnums=1)(w, "bfloat16"), jnp.asarray(exact, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["fp8", "int4-zeros"])
def test_products_on_a_cpu_have_the_bits_of_the_dequantised_weight(kind, dtype):
    w = kept(kind)
    array = jnp.asarray(by_definition(w), dtype)
    for count in (1, 5, 20):
        x, residual = rows(count, dtype), rows(count, dtype)[:, :N]
        for op in (
            lambda x, w: matmul(x, w, backend="cpu"),
            lambda x, w, r=residual: matmul(x, w, r, backend="cpu"),
            lambda x, w: partial_products(x, w, backend="cpu"),
            lambda x, w: gate_up(x, w, backend="cpu"),
        ):
            same(jax.jit(op)(x, w), jax.jit(op)(x, array))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_for_few_rows_converts_in_place(kind):
    """In one piece of K, in several, and gated; a scale after the sum would be another model."""
    w, x = kept(kind), rows(5, "bfloat16")
    array = jnp.asarray(by_definition(w), "bfloat16")
    for op in (canonical.matmul, canonical.gate_up, canonical.partial_products):
        same(op(x, w, interpret=True), op(x, array, interpret=True))
    many = rows(70, "bfloat16")  # in two tiles; more rows of an array go to another kernel
    some = canonical.matmul(many[64:], array, interpret=True)
    same(canonical.matmul(many, w, interpret=True)[64:], some)
    if kind == "fp8-column":
        unscaled = canonical.matmul(x, w.codes.astype(jnp.bfloat16), interpret=True)
        late = (unscaled.astype(jnp.float32) * w.scales[0]).astype(jnp.bfloat16)
        assert (late != canonical.matmul(x, w, interpret=True)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_kept_experts_have_the_bits_of_their_arrays(kind):
    """By the GPU's kernel, a CPU's and XLA: one expert without rows, one with rows of two tiles."""
    each = [kept(kind, seed) for seed in range(3)]
    w = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
    array = jnp.asarray(np.stack([by_definition(w) for w in each]), "bfloat16")
    assert w.shape == array.shape
    x, sizes = rows(25, "bfloat16"), jnp.array([5, 0, 20])
    for op in ("grouped_matmul", "grouped_gate_up"):
        for run in (
            functools.partial(getattr(triton, op), interpret=True),
            functools.partial(getattr(grouped_matmul, op), backend="cpu"),
            functools.partial(getattr(grouped_matmul, op), backend="xla"),
        ):
            same(jax.jit(run)(x, w, sizes), jax.jit(run)(x, array, sizes))


def test_triton_sums_k_of_kept_weights_in_the_order_of_arrays(tmp_path):
    """On an H200 each instruction sums 16 neighbours of K; after loads of one byte seen, others.

    No interpreter shows it: in Triton's words a thread has operands of width 2 along K, not 4.
    """
    w, experts = kept("fp8"), jax.tree.map(lambda part: jnp.stack([part] * 3), kept("int4-zeros"))

    def both(x, w, experts, sizes):
        grouped = grouped_matmul.grouped_matmul(x, experts, sizes, backend="canonical")
        return matmul(x, w, backend="canonical"), grouped

    dumped = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": "triton.*"}
    x, sizes = rows(16, "bfloat16"), jnp.array([5, 0, 11])
    compile_for(H200, both, x, w, experts, sizes, options=dumped)
    files = list(tmp_path.glob("*triton-to-llvm.txt"))
    assert len(files) == 2
    for file in files:
        text = file.read_text()
        begin = text.index("IR Dump Before AllocateSharedMemoryNv")
        kernel = text[begin : text.index("IR Dump", begin + 8)]
        assert set(re.findall(r"kWidth = (\d)", kernel)) == {"2"}, file.name


@pytest.mark.parametrize(("experts", "refused"), [(227, False), (228, True)])
def test_codes_that_a_kernel_would_misplace_are_refused(experts, refused):
    """Sizes of MiniMax-M2's experts in FP8: those of the last ones begin beyond 2^31 bytes."""
    K, N = 3072, 3072
    make = jax.ShapeDtypeStruct
    w = Quantised(
        make((experts, K, N), jnp.float8_e4m3fn),
        make((experts, K // 128, N), jnp.float32), None, 128,
    )  # fmt: skip
    sizes = make((experts,), jnp.int32)
    product = functools.partial(jax.eval_shape, triton.grouped_matmul, make((8, K), jnp.bfloat16))
    if refused:
        with pytest.raises(ValueError, match="Triton kernels read less than 2147483648 codes"):
            product(w, sizes)
    else:
        assert product(w, sizes).shape == (8, N)
