"""A mixture of experts in the canonical form: a token's bits are the same at every number of rows.

The products are the Triton kernel's, which sums K whole and ascending in tiles of any number of
rows. What comes before and after them, by token, are kernels of one program a token, the same one
whatever lies beside it: XLA would choose the order of a sum by shape. A layer needs few launches:
`route` chooses, `tiles_of_tokens` counts, two `of_tokens` multiply, and `expert_sum` adds.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.reference import ALPHA, LIMIT
from pallas_kernels.grouped_matmul.routes import route, softmax
from pallas_kernels.grouped_matmul.sums import expert_sum
from pallas_kernels.grouped_matmul.tokens_of import tiles_of_tokens
from pallas_kernels.grouped_matmul.triton import grouped_gate_up, grouped_matmul, of_tokens
from pallas_kernels.matmul.few_rows import silu_times

__all__ = [
    "GATES",
    "clamped_gate",
    "expert_sum",
    "grouped_gate_up",
    "grouped_matmul",
    "of_tokens",
    "probabilities",
    "route",
    "sigmoids",
    "tiles_of_tokens",
    "weighted_sum",
]
COLUMNS = 1024


@functools.partial(jax.jit, static_argnames="interpret")
def clamped_gate(
    gate: Float[Array, "R F"], up: Float[Array, "R F"], interpret: bool = False
) -> Float[Array, "R F"]:
    R, F = gate.shape
    return pl.pallas_call(
        _clamped_gate,
        name="clamped_gate",
        grid=(pl.cdiv(F, COLUMNS), R),
        out_shape=jax.ShapeDtypeStruct((R, F), gate.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(gate, up)


def _clamped_gate(gate_ref, up_ref, out_ref):
    columns = pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS)
    at, inside = (jnp.full(columns.shape, pl.program_id(1)), columns), columns < out_ref.shape[1]
    gate, up = (
        plt.load(ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
        for ref in (gate_ref, up_ref)
    )
    plt.store(out_ref.at[at], clamped(gate, up).astype(out_ref.dtype), mask=inside)


def clamped(gate: Array, up: Array) -> Array:
    """gpt-oss's activation, in float32."""
    gate = jnp.minimum(gate, LIMIT)
    return (jnp.clip(up, -LIMIT, LIMIT) + 1) * (gate / (1 + jnp.exp(-ALPHA * gate)))


GATES = {"silu": silu_times, "clamped": clamped}


@functools.partial(jax.jit, static_argnames="interpret")
def probabilities(logits: Float[Array, "M E"], interpret: bool = False) -> Float[Array, "M E"]:
    return _row_by_row(_probabilities, "router_probabilities", logits, interpret)


def _probabilities(logits_ref, out_ref):
    E = logits_ref.shape[1]
    columns = jnp.arange(pl.next_power_of_2(E))
    at, inside = (jnp.full(columns.shape, pl.program_id(0)), columns), columns < E
    logits = plt.load(logits_ref.at[at], mask=inside, other=-jnp.inf).astype(jnp.float32)
    plt.store(out_ref.at[at], softmax(logits), mask=inside)


@functools.partial(jax.jit, static_argnames="interpret")
def sigmoids(logits: Float[Array, "M E"], interpret: bool = False) -> Float[Array, "M E"]:
    return _row_by_row(_sigmoids, "router_sigmoids", logits, interpret)


def _row_by_row(kernel: Callable, name: str, logits: Float[Array, "M E"], interpret: bool):
    """A kernel's scores of a router's logits, a program a token."""
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(len(logits),),
        out_shape=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(logits)


def _sigmoids(logits_ref, out_ref):
    columns = jnp.arange(pl.next_power_of_2(logits_ref.shape[1]))
    at, inside = (jnp.full(columns.shape, pl.program_id(0)), columns), columns < out_ref.shape[1]
    logits = plt.load(logits_ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
    plt.store(out_ref.at[at], 1 / (1 + jnp.exp(-logits)), mask=inside)


@functools.partial(jax.jit, static_argnames="interpret")
def weighted_sum(
    outputs: Float[Array, "M k D"], weights: Float[Array, "M k"], interpret: bool = False
) -> Float[Array, "M D"]:
    M, _, D = outputs.shape
    return pl.pallas_call(
        _weighted_sum,
        name="weighted_sum",
        grid=(pl.cdiv(D, COLUMNS), M),
        out_shape=jax.ShapeDtypeStruct((M, D), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(outputs, weights)


def _weighted_sum(outputs_ref, weights_ref, out_ref):
    D, row = out_ref.shape[1], pl.program_id(1)
    columns = pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS)
    rows, inside = jnp.full(columns.shape, row), columns < D

    def term(i):
        at = rows, jnp.full(columns.shape, i), columns
        output = plt.load(outputs_ref.at[at], mask=inside, other=0.0)
        return weights_ref[row, i] * output.astype(jnp.float32)

    total = functools.reduce(jnp.add, map(term, range(outputs_ref.shape[1])))
    plt.store(out_ref.at[rows, columns], total, mask=inside)
