"""The canonical router after its product: the best experts of a token and their weights.

One program a token, the same one whatever lies beside it. It adds the pieces of the product, and
any bias, as the product itself would, so the logits are those of `matmul`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.in_pairs import sum_in_pairs


@functools.partial(jax.jit, static_argnames=("k", "chosen", "renormalise", "interpret"))
def route(
    pieces: Float[Array, "P M E"],
    bias: Float[Array, " E"] | None,
    *,
    k: int,
    chosen: bool,
    renormalise: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """Float32 weights and ids, the best first; see the folder's contract."""
    M = pieces.shape[1]
    return pl.pallas_call(
        functools.partial(_kernel, k=k, chosen=chosen, renormalise=renormalise),
        name="route",
        grid=(M,),
        out_shape=[jax.ShapeDtypeStruct((M, k), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(pieces, bias)


def softmax(logits: Float[Array, " E"]) -> Float[Array, " E"]:
    """Of a power of two of float32 logits, those beyond the last one -inf."""
    weights = jnp.exp(logits - jnp.max(logits, axis=0))
    return weights / sum_in_pairs(weights)


def rounded(x: Array) -> Array:
    """In float32, as bfloat16 holds it."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def added_pieces(load: Callable[[int], Array], count: int) -> Array:
    """Their sum, ascending, as the product rounds it."""
    total = functools.reduce(jnp.add, (load(p).astype(jnp.float32) for p in range(count)))
    return rounded(total)


def _kernel(pieces_ref, bias_ref, weights_ref, ids_ref, *, k, chosen, renormalise):
    P, _, E = pieces_ref.shape
    row, columns = pl.program_id(0), jnp.arange(pl.next_power_of_2(E))
    inside = columns < E

    def load(p):
        at = jnp.full(columns.shape, p), jnp.full(columns.shape, row), columns
        return plt.load(pieces_ref.at[at], mask=inside, other=0.0)

    logits = added_pieces(load, P)
    if bias_ref is not None:
        bias = plt.load(bias_ref.at[columns], mask=inside, other=0.0)
        logits = rounded(logits + bias.astype(jnp.float32))
    logits = jnp.where(inside, logits, -jnp.inf)
    scores = logits if chosen else jnp.where(inside, softmax(logits), -jnp.inf)
    ranks = jnp.arange(pl.next_power_of_2(k))
    best, ids = jnp.full(ranks.shape, -jnp.inf), jnp.zeros(ranks.shape, jnp.int32)
    total = jnp.float32(0)
    for i in range(k):
        most = jnp.max(scores, axis=0)
        id = jnp.argmax(scores, axis=0).astype(jnp.int32)  # the lowest of equal ones
        scores = jnp.where(columns == id, -jnp.inf, scores)
        best, ids = jnp.where(ranks == i, most, best), jnp.where(ranks == i, id, ids)
        total += most
    weights = softmax(best) if chosen else best / total if renormalise else best
    at = jnp.full(ranks.shape, row), ranks
    plt.store(weights_ref.at[at], weights, mask=ranks < k)
    plt.store(ids_ref.at[at], ids, mask=ranks < k)
