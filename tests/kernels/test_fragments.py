"""Kept weights in the order of wgmma's registers: where each code lies, and what is compiled."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.proof.program.compiled import inspect
from pallas_kernels.matmul import gate_up, matmul, partial_products
from pallas_kernels.matmul.kept.fragments import (
    COLUMNS,
    DEPTH,
    MAGIC,
    Fragments,
    abstract,
    fragments,
    refusal,
)
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised
from tests.support.described_gpu import H200, compile_for

FP8 = jnp.float8_e4m3fn
GROUPS = {"fp8": 128, "fp8-column": 0, "fp8-long": 256, "int4": 128, "int4-zeros": 32}
GROUPS |= {"fp8-narrow": 128, "mxfp4": 32}
NARROW = "fp8-narrow", "mxfp4", "int4", "int4-zeros"  # their scales are numbers of bfloat16


def kept(kind: str, K: int, N: int) -> Quantised:
    rng = np.random.default_rng(len(kind))
    group, packed = GROUPS[kind] or K, kind.startswith("int4")
    G = -(-K // group)
    scales = jnp.asarray(
        rng.uniform(0.01, 0.02, (G, N)), "bfloat16" if kind in NARROW else "float32"
    )
    codes = jnp.asarray(rng.normal(size=(K, N)), FP8)
    if packed:
        codes = jnp.asarray(rng.integers(0, 256, (K // 2, N)), jnp.uint8)
    zeros = jnp.asarray(rng.integers(0, 16, (G, N)), jnp.uint8) if kind == "int4-zeros" else None
    return Quantised(codes, scales, zeros, group)


def read_back(w: Fragments) -> np.ndarray:
    """The weight [K, N], as each thread of a warpgroup finds its codes in a tile.

    PTX, "Register fragments for wgmma.mma_async.m64nNk16": of rows 16·warp + lane / 4 and 8 more,
    columns 2·(lane % 4), the next, and 8 more. A wgmma's rows are the weight's columns.
    """
    (K, N), words = w.shape, np.asarray(w.words)
    out = np.empty((K, N), np.float32)
    for column, depth, thread in itertools.product(
        range(N // COLUMNS), range(K // DEPTH), range(128)
    ):
        tile = words[column, depth]
        mine = tile[: w.code_rows].reshape(-1, 128, 4)[:, thread].ravel()
        rest = tile[w.code_rows :].view(np.float32)
        scales, zeros = rest[: w.groups], rest[w.groups :]
        warp, lane = divmod(thread, 32)
        for block, half, pair in itertools.product(range(16), range(2), range(2)):
            n, group = 16 * warp + lane // 4 + 8 * half, block * w.groups // 16
            if w.bits == 8 and w.narrow:
                bits = int(mine[block]) >> 16 * pair & 0xFFFF
                bits = [bits & 0x8780 | bits >> 8 & 0x70, bits << 4 & 0x87F0][half]
                number = np.float32(np.uint16(bits).view(jnp.bfloat16))
            elif w.bits == 8:
                code = mine[block] >> (16 * half + 8 * pair) & 255
                number = np.float32(np.uint8(code).view(FP8))
            else:
                code = mine[block // 2] >> (8 * (block % 2) + 4 * half + 16 * pair) & 15
                number = np.float32(MAGIC + code) - zeros[group, n]
            k = DEPTH * depth + 8 * block + 2 * (lane % 4) + pair
            out[k, COLUMNS * column + n] = number * scales[group, n]
    return out


@pytest.mark.parametrize("kind", GROUPS)
def test_each_thread_finds_its_codes(kind):
    w = kept(kind, 256, 128)
    made = fragments(w)
    np.testing.assert_array_equal(read_back(made), dequantised(w, "float32"))
    assert jax.tree.structure(made) == jax.tree.structure(abstract(w))
    assert abstract(w).words.shape == made.words.shape


@pytest.mark.parametrize("firsts", [(0, 128), (128, 0)])
def test_pairs_are_columns_of_gate_and_up_in_turns(firsts):
    w, numbers = kept("int4-zeros", 128, 256), np.arange(128).reshape(-1, 8)
    made = fragments(w, firsts)
    columns = np.stack([numbers + firsts[0], numbers + firsts[1]], axis=1).ravel()
    np.testing.assert_array_equal(read_back(made), dequantised(w, "float32")[:, columns])
    assert jax.tree.structure(made) == jax.tree.structure(abstract(w, firsts))
    assert made.paired and not fragments(w).paired


@pytest.mark.parametrize(
    ("K", "N", "group", "why"),
    [
        (192, 128, 64, "pieces of K in 128s"),
        (256, 96, 64, "columns in 64s"),
        (384, 64, 48, "not 48"),
    ],
)
def test_a_weight_without_this_form_is_refused(K, N, group, why):
    w = Quantised(jnp.zeros((K, N), FP8), jnp.ones((-(-K // group), N)), None, group)
    assert why in (refusal(w) or "")
    with pytest.raises(ValueError, match=why):
        fragments(w)


LONG = pytest.mark.long


@pytest.mark.parametrize("rows", [16, 128, *(pytest.param(n, marks=LONG) for n in (1, 40, 512))])
def test_no_product_spills_or_makes_its_tensor_cores_wait(rows):
    """Registers decide that: a gate and an up in FP8, in FP8 pairs with either scales and in INT4
    pairs, and INT4 in two pieces with a residual."""

    def run(x, wide, w, pairs, v, r):
        y = gate_up(x, w, backend="canonical")
        y += sum(gate_up(x, both, backend="canonical") for both in pairs)
        pieces = partial_products(wide, v, backend="canonical")
        return matmul(y, v, r, backend="canonical"), pieces

    x, wide = (jax.ShapeDtypeStruct((rows, K), jnp.bfloat16) for K in (1024, 4096))
    w, v = (
        jax.eval_shape(lambda k=k, s=s: fragments(kept(k, *s)))
        for k, s in (("fp8", (1024, 8192)), ("int4", (4096, 1024)))
    )
    pairs = [
        jax.eval_shape(lambda k=k: fragments(kept(k, 1024, 8192), (0, 4096)))
        for k in ("fp8", "fp8-narrow", "int4")
    ]
    r = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
    program = inspect(
        lambda options: compile_for(H200, run, x, wide, w, pairs, v, r, options=options)
    )
    assert "kept_gate_up" in program.assembler and "kept_rows" in program.assembler
    assert "0 bytes spill stores" in program.assembler
    assert "Performance Loss" not in program.assembler


def test_it_is_for_the_canonical_products_alone():
    w = jax.eval_shape(functools.partial(fragments, kept("fp8", 256, 128)))
    x = jax.ShapeDtypeStruct((1, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="canonical"):
        jax.eval_shape(functools.partial(matmul, backend="xla"), x, w)
