"""The canonical products for few rows, in Pallas-Triton: tiles of 16 rows, a tensor core's least.

There is one program a column tile and piece of K. With several pieces each writes float32 sums,
which `canonical` adds in ascending order; a product of one piece rounds, and adds its residual or
gates, in place. Rows past M are loaded as zeros and not written.

Pallas-Triton is deprecated, but nothing else in jax 0.11.2 goes into CUDA graphs, compiles without
a GPU and has an interpreter. jax-triton's call goes into CUDA graphs as well; benchmarks/README.md
says what keeps it from taking this file's place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.grid import grid
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.kept.quantised import Quantised
from pallas_kernels.matmul.kept.tiles import depth_of, load_groups, load_tile

DEPTH = 64  # of the interpreter's dots: how it adds a dot up hangs on this, as on no GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """A program's rows, columns and step over K; speed only, never a result's bits."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4

    def __post_init__(self):
        for name in ("rows", "columns", "depth"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, 16 at least: {self}")


def product(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"] | Quantised,
    residual: Float[Array, "M N"] | None = None,
    *,
    pieces: int,
    tile: Tile,
    halves: Firsts | None = None,
    interpret: bool = False,
) -> Float[Array, "..."]:
    """The sums of all pieces [P, M, N] in float32; of one piece the result in x's dtype.

    The result is [M, N], or [M, N / 2] of two `halves`: one gates the other. The last tile of an
    array without halves may have fewer columns. ValueError if the tile does not divide others.
    """
    (M, K), N = x.shape, w.shape[1]
    columns = N // 2 if halves else N
    if interpret:
        tile = dataclasses.replace(tile, depth=min(tile.depth, DEPTH))
    ragged = columns % tile.columns and (halves or isinstance(w, Quantised))
    if ragged or K % (pieces * tile.depth):
        raise ValueError(f"{tile} divides neither {columns} columns nor {pieces} pieces of {K}")
    out = (
        jax.ShapeDtypeStruct((M, columns), x.dtype)
        if pieces == 1
        else jax.ShapeDtypeStruct((pieces, M, N), jnp.float32)
    )
    assert pieces == 1 or not (halves or residual is not None), "pieces are added first"
    inputs = (x, w) if residual is None else (x, w, residual)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, length=K // pieces, halves=halves),
        name="few_rows_gate_up" if halves else "few_rows",
        grid=(pl.cdiv(columns, tile.columns), pieces, pl.cdiv(M, tile.rows)),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(*inputs)


def _kernel(x_ref, w_ref, *rest, tile: Tile, length: int, halves: Firsts | None):
    *residual, out_ref = rest
    at = tuple(pl.program_id(axis) for axis in range(3))
    one_tile(x_ref, w_ref, residual, out_ref, at, tile=tile, length=length, halves=halves)


def one_tile(x_ref, w_ref, residual, out_ref, at, *, tile: Tile, length: int, halves=None):
    """What the program of `product` does at the column tile, piece and row tile of `at`."""
    M, N, many = x_ref.shape[0], w_ref.shape[1], len(out_ref.shape) == 3
    past = N % tile.columns and not halves
    column, piece = at[0] * tile.columns, at[1]
    rows = at[2] * tile.rows + jnp.arange(tile.rows)
    columns = column + jnp.arange(tile.columns)
    firsts = halves or (0,)

    depth, parts = depth_of(w_ref, tile.depth), [columns + first for first in firsts]
    steps = length // depth

    def groups_of(i):
        return tuple(load_groups(w_ref, piece * length + i * depth, depth, c) for c in parts)

    def add(i, carry):
        totals, groups = carry
        after = groups_of(jnp.minimum(i + 1, steps - 1))
        first = piece * length + i * depth
        k = first + jnp.arange(depth)
        x = _load(x_ref, rows, k, M)
        if past:
            inside = jnp.broadcast_to((columns < N)[None, :], (depth, tile.columns))
            tiles = (plt.load(grid(w_ref, k, columns), mask=inside, other=0.0),)
        else:
            tiles = (
                load_tile(w_ref, first, depth, c, own, x.dtype)
                for c, own in zip(parts, groups, strict=True)
            )
        return tuple(total + plt.dot(x, w) for total, w in zip(totals, tiles, strict=True)), after

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    start = tuple(zeros for _ in firsts), groups_of(0)
    totals, _ = lax.fori_loop(0, steps, add, start)
    inside = jnp.broadcast_to((rows < M)[:, None], zeros.shape)
    if past:
        inside &= (columns < N)[None, :]
    if many:
        plt.store(grid(out_ref, rows, columns, piece), totals[0], mask=inside)
        return
    out = totals[0].astype(out_ref.dtype)
    if halves:
        out = silu_times(*(t.astype(out_ref.dtype).astype(jnp.float32) for t in totals))
    elif residual:
        added = plt.load(grid(residual[0], rows, columns), mask=inside, other=0.0)
        added = added.astype(jnp.float32)
        out = added + out.astype(jnp.float32)
    plt.store(grid(out_ref, rows, columns), out.astype(out_ref.dtype), mask=inside)


def silu_times(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def best_of_tiles(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, tile: Tile, interpret: bool = False
) -> tuple[Float[Array, "C M"], Int[Array, "C M"], Float[Array, "C M"]]:
    """Per column tile and row: best logit, lowest id of it, sum of exp(logit - best)."""
    (M, K), V = x.shape, head.shape[0]
    if K % tile.depth:
        raise ValueError(f"{tile} does not divide K {K}")
    tiles = pl.cdiv(V, tile.columns)
    types = (jnp.float32, jnp.int32, jnp.float32)
    return pl.pallas_call(
        functools.partial(_head_kernel, tile=tile),
        name="few_rows_head",
        grid=(tiles, pl.cdiv(M, tile.rows)),
        out_shape=tuple(jax.ShapeDtypeStruct((tiles, M), t) for t in types),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(x, head)


def head_logits(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, tile: Tile, interpret: bool = False
) -> Float[Array, "M V"]:
    """The logits that `best_of_tiles` compares, in float32. ValueError as there."""
    (M, K), V = x.shape, head.shape[0]
    if K % tile.depth:
        raise ValueError(f"{tile} does not divide K {K}")
    return pl.pallas_call(
        functools.partial(_logits_kernel, tile=tile),
        name="few_rows_logits",
        grid=(pl.cdiv(V, tile.columns), pl.cdiv(M, tile.rows)),
        out_shape=jax.ShapeDtypeStruct((M, V), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(x, head)


def _logits_kernel(x_ref, head_ref, out_ref, *, tile: Tile):
    rows, ids, logits = _head_tile(x_ref, head_ref, tile)
    inside = (rows < x_ref.shape[0])[:, None] & (ids < head_ref.shape[0])[None, :]
    plt.store(grid(out_ref, rows, ids), logits, mask=inside)


def _head_tile(x_ref, head_ref, tile: Tile):
    """Rows, ids and logits of this program's tile; of ids past V 0."""
    (M, K), V = x_ref.shape, head_ref.shape[0]
    rows = pl.program_id(1) * tile.rows + jnp.arange(tile.rows)
    ids = pl.program_id(0) * tile.columns + jnp.arange(tile.columns)

    def add(i, total):
        k = i * tile.depth + jnp.arange(tile.depth)
        return total + plt.dot(_load(x_ref, rows, k, M), _load(head_ref, ids, k, V), trans_b=True)

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    return rows, ids, lax.fori_loop(0, K // tile.depth, add, zeros)


def _head_kernel(x_ref, head_ref, best_ref, id_ref, sum_ref, *, tile: Tile):
    M, V, number = x_ref.shape[0], head_ref.shape[0], pl.program_id(0)
    rows, ids, logits = _head_tile(x_ref, head_ref, tile)
    logits = jnp.where((ids < V)[None, :], logits, -jnp.inf)
    best = jnp.max(logits, axis=1)
    is_best = logits == best[:, None]
    lowest = jnp.min(jnp.where(is_best, ids[None, :], jnp.int32(2**31 - 1)), axis=1)
    weight = jnp.sum(jnp.exp(logits - best[:, None]), axis=1)
    at = jnp.full(rows.shape, number), rows
    for ref, value in ((best_ref, best), (id_ref, lowest), (sum_ref, weight)):
        plt.store(ref.at[at], value, mask=rows < M)


def _load(ref, rows, columns, end: int):
    """[rows, columns] of a matrix; rows from `end` are zeros."""
    at = grid(ref, rows, columns)
    if end % rows.size == 0:
        return plt.load(at)
    inside = jnp.broadcast_to((rows < end)[:, None], (rows.size, columns.size))
    return plt.load(at, mask=inside, other=0.0)
