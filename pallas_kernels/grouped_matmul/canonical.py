"""A mixture of experts in the canonical form: a token's bits are the same at every number of rows.

The products are the Triton kernel's, which sums K whole and ascending in tiles of any number of
rows. What comes before and after them, by token, are kernels of one program a token, the same one
whatever lies beside it: XLA would choose the order of a sum by shape. A layer needs few launches:
`route` chooses, `tiles_of_tokens` counts, two `of_tokens` multiply, and `expert_sum` adds.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.kept import down_of_fragments, gate_up_of_fragments
from pallas_kernels.grouped_matmul.reference import ALPHA, LIMIT
from pallas_kernels.grouped_matmul.routes import route
from pallas_kernels.grouped_matmul.sums import expert_sum
from pallas_kernels.grouped_matmul.tokens_of import tiles_of_tokens
from pallas_kernels.grouped_matmul.triton import grouped_gate_up, grouped_matmul, of_tokens
from pallas_kernels.matmul.few_rows import silu_times

__all__ = [
    "GATES",
    "down_of_fragments",
    "expert_sum",
    "gate_up_of_fragments",
    "grouped_gate_up",
    "grouped_matmul",
    "of_tokens",
    "route",
    "sigmoids",
    "tiles_of_tokens",
]


def clamped(gate: Array, up: Array) -> Array:
    """gpt-oss's activation, in float32."""
    gate = jnp.minimum(gate, LIMIT)
    return (jnp.clip(up, -LIMIT, LIMIT) + 1) * (gate / (1 + jnp.exp(-ALPHA * gate)))


GATES = {"silu": silu_times, "clamped": clamped}


@functools.partial(jax.jit, static_argnames="interpret")
def sigmoids(logits: Float[Array, "M E"], interpret: bool = False) -> Float[Array, "M E"]:
    return pl.pallas_call(
        _sigmoids,
        name="router_sigmoids",
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
