"""Calls of one op at one shape share a kernel: many layers lower and compile it only once.

Without it the time to trace, lower and compile grows with the number of layers.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import grouped_matmul, heads_to_cache
from pallas_kernels.heads_to_cache import Heads
from tests.support.described_gpu import H200, lower_for

HEADS = Heads(4, 2, 128, 1e-6, (0, 512, 768))


def struct(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X, SCALE, ANGLE = struct(1, 1, 16, 1024), struct(128), struct(1, 16, 64, dtype="float32")
CACHE, SLOTS = struct(1, 256, 2, 128), struct(1, 16, dtype="int32")
ROWS, SIZES = struct(128, 256), struct(8, dtype="int32")
WRITTEN = functools.partial(heads_to_cache.heads_to_cache, heads=HEADS, backend="triton")
SPLIT = functools.partial(
    heads_to_cache.split_heads, heads=HEADS, dtype=jnp.bfloat16, backend="triton"
)
PRODUCT = functools.partial(grouped_matmul.grouped_matmul, backend="triton")
GATED = functools.partial(grouped_matmul.grouped_gate_up, backend="triton")


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (WRITTEN, (X, SCALE, SCALE, ANGLE, ANGLE, CACHE, CACHE, SLOTS)),
        (SPLIT, (X, SCALE, SCALE, ANGLE, ANGLE)),
        (PRODUCT, (ROWS, struct(8, 256, 128), SIZES)),
        (GATED, (ROWS, struct(8, 256, 256), SIZES)),
    ],
    ids=["heads_to_cache", "split_heads", "grouped_matmul", "grouped_gate_up"],
)
def test_two_calls_share_one_kernel(op, arguments):
    def twice(*arrays):
        first, second = op(*arrays), op(*(x + jnp.ones_like(x) for x in arrays))
        return first, second

    text = lower_for(H200, twice, *arguments).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
