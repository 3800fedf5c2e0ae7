"""The canonical end of a layer of experts: the weighted sum, a shared expert's output, a residual.

One program a token and some of its columns, the same one whatever lies beside it. Where a norm
follows, `rms_norm.after` makes the sum in its own kernel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.routes import added_pieces, rounded
from pallas_kernels.in_pairs import sum_in_pairs

COLUMNS = 1024


class Shared(NamedTuple):
    """An expert for every token: the pieces of its second product, and any gate.

    The gate is σ of a token's `x` times `column`, summed in float32 and rounded.
    """

    pieces: Float[Array, "P M D"]
    x: Float[Array, "M K"] | None = None
    column: Float[Array, " K"] | None = None


class Weighed(NamedTuple):
    """What is to be added for each token, and not yet added; see `expert_sum`."""

    outputs: Float[Array, "M k D"] | Float[Array, "TR D"]
    weights: Float[Array, "M k"]
    shared: Shared | None
    residual: Float[Array, "*lead D"] | None
    places: Int[Array, " R"] | None


def weighed_sum(given: Weighed) -> Float[Array, "*lead D"]:
    """The sum by itself, beside a residual."""
    residual = given.residual
    assert residual is not None
    flat = given._replace(residual=residual.reshape(-1, residual.shape[-1]))
    return expert_sum(*flat).reshape(residual.shape)


@functools.partial(jax.jit, static_argnames="interpret")
def expert_sum(
    outputs: Float[Array, "M k D"] | Float[Array, "TR D"],
    weights: Float[Array, "M k"],
    shared: Shared | None = None,
    residual: Float[Array, "M D"] | None = None,
    places: Int[Array, " R"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "M D"]:
    """Σ weights · outputs, plus the shared expert, plus the residual, each sum rounded.

    With `places`, where each token's outputs lie among rows of `outputs`, these are [_, D].
    """
    M, D = len(weights), outputs.shape[-1]
    return pl.pallas_call(
        _kernel,
        name="expert_sum",
        grid=(pl.cdiv(D, COLUMNS), M),
        out_shape=jax.ShapeDtypeStruct((M, D), outputs.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(outputs, weights, shared, residual, places)


def _kernel(outputs_ref, weights_ref, shared, residual_ref, places_ref, out_ref):
    row, columns = pl.program_id(1), pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS)
    inside = columns < out_ref.shape[1]
    given = Weighed(outputs_ref, weights_ref, shared, residual_ref, places_ref)
    total = total_of(given, row, columns, inside).astype(out_ref.dtype)
    plt.store(out_ref.at[jnp.full(columns.shape, row), columns], total, mask=inside)


def total_of(given: Weighed, row, columns, inside):
    """A token's sum at these columns, of references: rounded, in float32.

    All is read before the gate is summed over threads, for which they wait.
    """
    outputs_ref, weights_ref, shared, residual_ref, places_ref = given
    rows = jnp.full(columns.shape, row)

    def load(ref, *at):
        return plt.load(ref.at[at], mask=inside, other=0.0).astype(jnp.float32)

    k = weights_ref.shape[1]

    def term(i):
        if places_ref is None:
            own = load(outputs_ref, rows, jnp.full(columns.shape, i), columns)
        else:
            own = load(outputs_ref, jnp.full(columns.shape, places_ref[row * k + i]), columns)
        return weights_ref[row, i] * own

    before = None if residual_ref is None else load(residual_ref, rows, columns)
    gate = None if shared is None or shared.x is None else _gate(shared, row)
    total = rounded(functools.reduce(jnp.add, map(term, range(k))))
    if shared is not None:
        count = shared.pieces.shape[0]
        own = added_pieces(
            lambda p: load(shared.pieces, jnp.full(columns.shape, p), rows, columns), count
        )
        if gate is not None:
            own = rounded(1 / (1 + jnp.exp(-rounded(sum_in_pairs(gate)))) * own)
        total = rounded(total + own)
    return total if before is None else rounded(before + total)


def _gate(shared, row):
    """The products of a gate's logit, which are whole in float32: of bfloat16."""
    K = shared.x.shape[1]
    columns = jnp.arange(pl.next_power_of_2(K))
    inside, rows = columns < K, jnp.full(columns.shape, row)
    x = plt.load(shared.x.at[rows, columns], mask=inside, other=0.0).astype(jnp.float32)
    column = plt.load(shared.column.at[columns], mask=inside, other=0.0).astype(jnp.float32)
    return x * column
