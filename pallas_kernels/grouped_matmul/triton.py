"""The grouped GEMMs in Pallas-Triton: one program a tile of one expert's rows and columns.

XLA makes the list of tiles on the device, as many as any routing can need: a tile holds rows of one
expert only, and those that a routing leaves over end at once. So only experts that have rows are
read, each once for every BLOCK_M rows of it. K is summed in the same order whatever the tile holds.
Tiles of kept weights are converted where they are multiplied.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.grid import grid
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.kept_tiles import depth_of, load_groups, load_tile
from pallas_kernels.matmul.quantised import Quantised

BLOCK_N = 64
BLOCK_K = 64


class Tiles(NamedTuple):
    """Which rows a tile holds, and of which expert; none if begin == end."""

    expert: Int[Array, " T"]
    begin: Int[Array, " T"]
    end: Int[Array, " T"]


def grouped_matmul(
    x: Float[Array, "R K"],
    w: Float[Array, "E K N"] | Quantised,
    sizes: Int[Array, " E"],
    interpret=False,
) -> Float[Array, "R N"]:
    """See the folder's contract. Without `interpret` it compiles for a GPU only."""
    return _call(x, w, sizes, w.shape[2], (0,), interpret)


def grouped_gate_up(
    x: Float[Array, "R K"],
    w: Float[Array, "E K FF"] | Quantised,
    sizes: Int[Array, " E"],
    firsts: Firsts | None = None,
    interpret=False,
) -> Float[Array, "R F"]:
    """See the folder's contract. Without `interpret` it compiles for a GPU only."""
    columns = w.shape[2] // 2
    return _call(x, w, sizes, columns, firsts or (0, columns), interpret)


def divides(K: int, columns: int) -> bool:
    """Whether the kernel's tiles divide a product summed over K with so many columns of output."""
    return K % BLOCK_K == 0 and columns % BLOCK_N == 0


def row_block(rows: int, experts: int) -> int:
    """Rows of a tile: what an expert gets on average, 16 (the least of a tensor core) to 64."""
    return min(64, max(16, pl.next_power_of_2(rows // experts)))


def tiles_of(sizes: Int[Array, " E"], rows: int, block: int) -> Tiles:
    """The tiles of all experts in their order; a fixed number, enough for any sizes."""
    experts = sizes.shape[0]
    # Every expert with rows has at most one tile that is not full.
    count = rows // block + min(experts, rows)
    tiles = (sizes + block - 1) // block
    ends = jnp.cumsum(tiles)
    tile = jnp.arange(count)
    expert = jnp.sum(tile[:, None] >= ends, axis=1)  # `experts` for tiles left over
    real = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    last = jnp.cumsum(sizes)[expert]
    begin = last - sizes[expert] + (tile - (ends - tiles)[expert]) * block
    begin = jnp.where(real, begin, 0)
    end = jnp.where(real, jnp.minimum(begin + block, last), 0)
    return Tiles(*(part.astype(jnp.int32) for part in (expert, begin, end)))


# An inner jit: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _call(x, w, sizes, columns: int, firsts: tuple[int, ...], interpret: bool):
    (R, K), E = x.shape, w.shape[0]
    stored = x.dtype if isinstance(w, Quantised) else w.dtype
    if not (x.dtype == stored == jnp.bfloat16 and divides(K, columns)):
        raise ValueError(
            f"the Triton grouped matmul needs bfloat16, K in {BLOCK_K}s and columns in {BLOCK_N}s, "
            f"got {x.dtype} by {stored}, K {K}, {columns} columns: use the backend 'xla'"
        )
    block = row_block(R, E)
    tiles = tiles_of(sizes, R, block)
    kernel = functools.partial(_kernel, block=block, depth=depth_of(w, BLOCK_K), firsts=firsts)
    return pl.pallas_call(
        kernel,
        name="grouped_gate_up" if len(firsts) > 1 else "grouped_matmul",
        grid=(columns // BLOCK_N, tiles.begin.shape[0]),
        out_shape=jax.ShapeDtypeStruct((R, columns), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
    )(*tiles, x, w)


def _kernel(expert_ref, begin_ref, end_ref, x_ref, w_ref, out_ref, *, block, depth, firsts):
    column, tile = pl.program_id(0), pl.program_id(1)
    expert, begin, end = expert_ref[tile], begin_ref[tile], end_ref[tile]

    @pl.when(begin < end)
    def _():
        rows = begin + jnp.arange(block)
        at_column = column * BLOCK_N + jnp.arange(BLOCK_N)

        columns = [at_column + first for first in firsts]
        steps = x_ref.shape[1] // depth

        def groups_of(i):
            return tuple(load_groups(w_ref, i * depth, depth, c, expert) for c in columns)

        def add(i, carry):
            sums, groups = carry
            after = groups_of(jnp.minimum(i + 1, steps - 1))
            k = i * depth + jnp.arange(depth)
            # Rows of another expert, or none, count as zeros and are not written.
            inside = jnp.broadcast_to((rows < end)[:, None], (block, depth))
            x = plt.load(grid(x_ref, rows, k), mask=inside, other=0.0)
            tiles = (
                load_tile(w_ref, i * depth, depth, c, own, x.dtype, expert)
                for c, own in zip(columns, groups, strict=True)
            )
            return tuple(total + plt.dot(x, w) for total, w in zip(sums, tiles, strict=True)), after

        zeros = tuple(jnp.zeros((block, BLOCK_N), jnp.float32) for _ in firsts)
        sums, _ = lax.fori_loop(0, steps, add, (zeros, groups_of(0)))
        out = sums[0]
        if len(firsts) > 1:
            gate, up = (total.astype(out_ref.dtype).astype(jnp.float32) for total in sums)
            out = gate / (1 + jnp.exp(-gate)) * up
        mask = jnp.broadcast_to((rows < end)[:, None], (block, BLOCK_N))
        plt.store(grid(out_ref, rows, at_column), out.astype(out_ref.dtype), mask=mask)
