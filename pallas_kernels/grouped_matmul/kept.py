"""A layer's experts whose codes lie in fragments: gate and up, then down, for every token.

Both products are rounded as the folder's contract has them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import used
from pallas_kernels.grouped_matmul.kept_mosaic import product
from pallas_kernels.grouped_matmul.tokens_of import row_block, tile_count, tiles_of_tokens
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.kept.fragments import Fragments


class Inner(NamedTuple):
    """What gate and up leave: the rows of all tiles, which of them are used, and where in them
    lies token t's of its i-th expert."""

    rows: Float[Array, "TR F"]
    work: used.Used
    places: Int[Array, " R"]


def gate_up_of_fragments(
    x: Float[Array, "M K"], ids: Int[Array, "M k"], gate_up: Fragments, firsts: Firsts
) -> Inner:
    return _gate_up(x, ids, gate_up, firsts)


def down_of_fragments(inner: Inner, ids: Int[Array, "M k"], down: Fragments) -> Float[Array, "_ D"]:
    """The tiles' rows of output. Of devices that share the layer `inner` has all columns."""
    return _down(inner, ids, down)


def tile_sizes(tokens: int, k: int, experts: int) -> tuple[int, int]:
    """How many tiles these products have, and rows of each."""
    if tokens <= used.FEW:
        return experts, -(-tokens // 8) * 8
    block = row_block(tokens * k, experts)
    return tile_count(tokens * k, experts, block), block


# An inner jit: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=3)
def _gate_up(x, ids, gate_up: Fragments, firsts: Firsts):
    (M, k), experts = ids.shape, gate_up.shape[0]
    T, rows = tile_sizes(M, k, experts)
    if M <= used.FEW:
        work = used.of_few(ids, experts)
        own = jnp.pad(x, ((0, rows - M), (0, 0))) if M > 8 else x  # up to 8 TMA fills with zeros
        places = (ids * rows + jnp.arange(M)[:, None]).reshape(-1).astype(jnp.int32)
    else:
        tiles = tiles_of_tokens(ids, experts)
        assert tiles.places is not None
        work, places = used.of_many(tiles), tiles.places
        own = used.rows_of(x, tiles, work, k)
    return Inner(product(own, gate_up, work, T, rows, firsts), work, places)


@jax.jit
def _down(inner: Inner, ids, down: Fragments):
    (M, k), experts = ids.shape, down.shape[0]
    return product(inner.rows, down, inner.work, *tile_sizes(M, k, experts))
