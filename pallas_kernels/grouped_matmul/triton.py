"""The grouped GEMMs in Pallas-Triton: one program a tile of one expert's rows and columns.

The list of tiles is made on the device, as many as any routing can need: a tile holds rows of one
expert only, and those that a routing leaves over end at once. So only experts that have rows are
read, each once for every tile of its rows. K is summed in the same order whatever the tile holds.
Rows lie anywhere: a tile reads and writes them where they are, and a token's row serves all its
experts. Tiles of kept weights are converted where they are multiplied.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.grid import grid
from pallas_kernels.grouped_matmul.tokens_of import Tiles, row_block
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.few_rows import silu_times
from pallas_kernels.matmul.kept.quantised import Quantised
from pallas_kernels.matmul.kept.tiles import depth_of, load_groups, load_tile
from pallas_kernels.matmul.tuning import SMS

BLOCK_N = (64, 32, 16)  # columns of a tile: the most that divide those of the output
BLOCK_K = 64
DEEP = 128  # of K, where few programs are to have as many bytes on their way
Gate = Callable[[Array, Array], Array]  # of gate and up, in float32


def grouped_matmul(
    x: Float[Array, "R K"],
    w: Float[Array, "E K N"] | Quantised,
    sizes: Int[Array, " E"],
    interpret=False,
) -> Float[Array, "R N"]:
    """See the folder's contract. Without `interpret` it compiles for a GPU only."""
    return _by_sizes(x, w, sizes, w.shape[2], (0,), interpret)


def grouped_gate_up(
    x: Float[Array, "R K"],
    w: Float[Array, "E K FF"] | Quantised,
    sizes: Int[Array, " E"],
    firsts: Firsts | None = None,
    interpret=False,
) -> Float[Array, "R F"]:
    """See the folder's contract. Without `interpret` it compiles for a GPU only."""
    columns = w.shape[2] // 2
    return _by_sizes(x, w, sizes, columns, firsts or (0, columns), interpret)


def of_tokens(
    x: Float[Array, "M K"] | Float[Array, "R K"],
    w: Float[Array, "E K N"] | Quantised,
    tiles: Tiles,
    R: int,
    bias: Float[Array, "E N"] | None = None,
    firsts: Firsts | None = None,
    gate: Gate | None = None,
    interpret=False,
) -> Float[Array, "R _"]:
    """Every row, or the token that it is of, times its expert's w, its bias added.

    With `firsts`, `gate` makes one half of both; each is rounded before. What no tile has holds
    anything.
    """
    columns = w.shape[2] // (2 if firsts else 1)
    return _call(x, w, tiles, bias, R, columns, firsts or (0,), gate, interpret)


def divides(K: int, columns: int) -> bool:
    """Whether the kernel's tiles divide a product summed over K with so many columns of output."""
    return K % BLOCK_K == 0 and columns % min(BLOCK_N) == 0


def width_of(columns: int) -> int:
    """The columns of a tile, which change no bit."""
    return next(width for width in BLOCK_N if columns % width == 0)


def depth_for(K: int, programs: int) -> int:
    """How much of K a program reads at a time, which changes no bit on a GPU: its tensor cores add
    16 at a time, where NumPy's product, which interprets, takes them all at once.

    With one token's rows of Qwen3-Coder's first product, 96 programs of an H200 took 20.2 µs in
    place of 22.5 (jax 0.11.2, 2026-11-27, benchmarks/h200-expert-tiles.json).
    """
    return DEEP if programs < SMS and K % DEEP == 0 else BLOCK_K


def tiles_of(sizes: Int[Array, " E"], rows: int, block: int) -> Tiles:
    """The tiles of rows that lie by expert; a fixed number, enough for any sizes."""
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
    own = begin[:, None] + jnp.arange(block)
    members = jnp.where(real[:, None] & (own < last[:, None]), own, -1)
    return Tiles(expert.astype(jnp.int32), members.astype(jnp.int32), None)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _by_sizes(x, w, sizes, columns: int, firsts: tuple[int, ...], interpret: bool):
    R = len(x)
    tiles = tiles_of(sizes, R, row_block(R, len(sizes)))
    gate = silu_times if len(firsts) > 1 else None
    return _call(x, w, tiles, None, R, columns, firsts, gate, interpret)


# An inner jit: all layers then share what is traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _call(
    x, w, tiles: Tiles, bias, R: int, columns: int, firsts: tuple[int, ...],
    gate: Gate | None, interpret: bool,
):  # fmt: skip
    K = x.shape[1]
    stored = x.dtype if isinstance(w, Quantised) else w.dtype
    if not (x.dtype == stored == jnp.bfloat16 and divides(K, columns)):
        raise ValueError(
            f"the Triton grouped matmul needs bfloat16, K in {BLOCK_K}s and columns in "
            f"{min(BLOCK_N)}s, got {x.dtype} by {stored}, K {K}, {columns} columns: "
            "use the backend 'xla'"
        )
    width = width_of(columns)
    grid_size = columns // width, len(tiles.expert)
    shallow = interpret or isinstance(w, Quantised)
    depth = depth_of(w, BLOCK_K if shallow else depth_for(K, math.prod(grid_size)))
    how = {"depth": depth, "width": width, "firsts": firsts, "gate": gate, "share": R // len(x)}
    return pl.pallas_call(
        functools.partial(_kernel, **how),
        name="grouped_gate_up" if len(firsts) > 1 else "grouped_matmul",
        grid=grid_size,
        out_shape=jax.ShapeDtypeStruct((R, columns), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
    )(tiles, x, w, bias)


def _kernel(tiles, x_ref, w_ref, bias_ref, out_ref, **how):
    at = pl.program_id(0), pl.program_id(1)
    one_tile(tiles, x_ref, w_ref, bias_ref, out_ref, *at, **how)


def one_tile(
    tiles, x_ref, w_ref, bias_ref, out_ref, column, tile, *, depth, firsts, gate, share, width,
):  # fmt: skip
    """What the program of a tile of `width` columns and one of rows does; `share`: rows of an x."""
    expert, R, block = tiles.expert[tile], out_ref.shape[0], tiles.members.shape[1]

    def owned(rows, place):
        """Whether rows are in this tile."""
        inside = (rows >= 0) & (rows < R)
        if tiles.places is None:
            return inside
        own = plt.load(tiles.places.at[jnp.where(inside, rows, 0)])
        return inside & (own == tile * block + place)

    @pl.when(owned(tiles.members[tile, 0], 0) & (expert >= 0) & (expert < w_ref.shape[0]))
    def _():
        places = jnp.arange(block)
        rows = plt.load(tiles.members.at[jnp.full(block, tile), places])
        inside = owned(rows, places)
        rows = jnp.where(inside, rows, R)
        at_column = column * width + jnp.arange(width)

        columns = [at_column + first for first in firsts]
        steps = x_ref.shape[1] // depth

        def groups_of(i):
            return tuple(load_groups(w_ref, i * depth, depth, c, expert) for c in columns)

        def add(i, carry):
            sums, groups = carry
            after = groups_of(jnp.minimum(i + 1, steps - 1))
            k = i * depth + jnp.arange(depth)
            # Rows of another tile, or none, count as zeros and are not written.
            mask = jnp.broadcast_to(inside[:, None], (block, depth))
            x = plt.load(grid(x_ref, rows // share, k), mask=mask, other=0.0)
            tiles = (
                load_tile(w_ref, i * depth, depth, c, own, x.dtype, expert)
                for c, own in zip(columns, groups, strict=True)
            )
            return tuple(total + plt.dot(x, w) for total, w in zip(sums, tiles, strict=True)), after

        zeros = tuple(jnp.zeros((block, width), jnp.float32) for _ in firsts)
        sums, _ = lax.fori_loop(0, steps, add, (zeros, groups_of(0)))
        parts = [total.astype(out_ref.dtype).astype(jnp.float32) for total in sums]
        if bias_ref is not None:
            for i, c in enumerate(columns):
                own = plt.load(bias_ref.at[jnp.full(width, expert), c]).astype(jnp.float32)
                parts[i] = (parts[i] + own[None, :]).astype(out_ref.dtype).astype(jnp.float32)
        out = gate(*parts) if gate else parts[0]
        mask = jnp.broadcast_to(inside[:, None], (block, width))
        plt.store(grid(out_ref, rows, at_column), out.astype(out_ref.dtype), mask=mask)
