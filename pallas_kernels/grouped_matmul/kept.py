"""A layer's experts whose codes lie in fragments: gate and up, then down, for every token."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import used
from pallas_kernels.grouped_matmul.kept_mosaic import product
from pallas_kernels.grouped_matmul.tokens_of import row_block, tile_count, tiles_of_tokens
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.fragments import Fragments


def of_fragments(
    x: Float[Array, "M K"],
    ids: Int[Array, "M k"],
    gate_up: Fragments,
    down: Fragments,
    firsts: Firsts,
) -> tuple[Float[Array, "TR D"], Int[Array, " R"]]:
    """The tiles' rows of output, and where among them token t's of its i-th expert lies.

    Products and activation are rounded as the folder's contract has them.
    """
    return _of_fragments(x, ids, gate_up, down, firsts)


def tile_sizes(tokens: int, k: int, experts: int) -> tuple[int, int]:
    """How many tiles `of_fragments` has, and rows of each."""
    if tokens <= used.FEW:
        return experts, -(-tokens // 8) * 8
    block = row_block(tokens * k, experts)
    return tile_count(tokens * k, experts, block), block


# An inner jit: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=4)
def _of_fragments(x, ids, gate_up: Fragments, down: Fragments, firsts: Firsts):
    (M, k), experts = ids.shape, gate_up.shape[0]
    T, rows = tile_sizes(M, k, experts)
    if M <= used.FEW:
        work = used.of_few(ids, experts)
        own = jnp.pad(x, ((0, rows - M), (0, 0))) if M > 8 else x  # up to 8 TMA fills with zeros
        places = (ids * rows + jnp.arange(M)[:, None]).reshape(-1).astype(jnp.int32)
    else:
        tiles = tiles_of_tokens(ids, experts)
        work, places = used.of_many(tiles), tiles.places
        own = used.rows_of(x, tiles, work, k)
    inner = product(own, gate_up, work, T, rows, firsts)
    return product(inner, down, work, T, rows), places
