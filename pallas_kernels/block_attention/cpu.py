"""Block attention on a CPU, by pieces of absolute positions: the same bits at all B, T and S.

Keys are read in pieces of PIECE positions that begin at multiples of it, ascending, wherever their
slots lie, and queries TILE rows at a time. So XLA's products have one shape, and a row's result is
the same sums in the same order in every program. A piece of which a row sees nothing leaves the
row's sums as they are; pieces that no row of a tile sees are not read.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fixed_order import rounded, row_sum

PIECE = 64
TILE = 16


class Sums(NamedTuple):
    """Σ weight · value and Σ weight of the pieces so far, each weight relative to exp(top)."""

    total: Float[Array, "B K R H"]
    weight: Float[Array, "B K R"]
    top: Float[Array, "B K R"]


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
    table: Int[Array, "B _"] | None = None,
) -> Float[Array, "B T N H"]:
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    tiles = -(-T // TILE)
    sees = functools.partial(
        _sees, lengths=lengths, widths=widths, causal=causal, window=window,
        overwritten=lengths + T - 1 - S if ring else None,
    )  # fmt: skip
    if table is not None:
        S = table.shape[1] * PIECE
    read = _reader(k, v, ring) if table is None else _page_reader(k, v, table)
    sink = None if sinks is None else _rows(jnp.broadcast_to(sinks[:, None], (1, TILE, N, 1)), K)

    def one_tile(first: Int[Array, ""], tile: Float[Array, "B _ N H"]) -> Float[Array, "B _ N H"]:
        ahead = jnp.minimum(first + TILE, widths) if causal else widths
        end = jnp.max(lengths + ahead)
        if not ring:
            end = jnp.minimum(end, S)
        begin = jnp.int32(0)
        if window is not None:
            begin = jnp.maximum(jnp.min(lengths) + first - window + 1, 0)
        rows = _rows(tile, K)

        def add(piece: Int[Array, ""], sums: Sums) -> Sums:
            positions = piece * PIECE + jnp.arange(PIECE)
            used, visible = sees(positions, first + jnp.arange(TILE))
            keys, values = read(piece)
            values = jnp.where(used[:, :, None, None], values, 0)
            seen = jnp.repeat(visible, N // K, axis=1)[:, None]
            return _add(sums, rows, keys, values, seen, scale, softcap)

        # No row has seen anything yet, so its top is below every score.
        shape = rows.shape[:-1]
        nothing = Sums(jnp.zeros((*shape, H)), jnp.zeros(shape), jnp.full(shape, -jnp.inf))
        sums = lax.fori_loop(begin // PIECE, -(-end // PIECE), add, nothing)
        out = _result(sums, None if sink is None else sink[..., 0])
        out = out.reshape(B, K, TILE, N // K, H).transpose(0, 2, 1, 3, 4)
        return out.reshape(B, TILE, N, H).astype(q.dtype)

    padded = jnp.pad(q, ((0, 0), (0, tiles * TILE - T), (0, 0), (0, 0)))
    if tiles == 1:
        return one_tile(jnp.int32(0), padded)[:, :T]
    cut = padded.reshape(B, tiles, TILE, N, H).swapaxes(0, 1)
    out = lax.map(lambda each: one_tile(*each), (jnp.arange(tiles) * TILE, cut))
    return out.swapaxes(0, 1).reshape(B, tiles * TILE, N, H)[:, :T]


def _rows(x: Float[Array, "B T N H"], K: int) -> Float[Array, "B K R H"]:
    """The rows of a tile that share a KV head: each query's heads side by side."""
    B, T, N, H = x.shape
    return x.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * N // K, H)


def _reader(k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], ring: bool) -> Callable:
    """Keys and values [B, PIECE, K, H] of a piece; any others for positions without a slot."""
    S = k.shape[1]
    if ring and S % PIECE:

        def take(piece):
            slots = (piece * PIECE + jnp.arange(PIECE)) % S
            return tuple(jnp.take(x, slots, axis=1) for x in (k, v))

        return take
    beyond = (0, 0), (0, -S % PIECE), (0, 0), (0, 0)
    whole = [jnp.pad(x, beyond) if S % PIECE else x for x in (k, v)]

    def cut(piece):
        first = piece * PIECE % S if ring else piece * PIECE
        return tuple(lax.dynamic_slice_in_dim(x, first, PIECE, axis=1) for x in whole)

    return cut


def _page_reader(
    k: Float[Array, "_ _ K H"], v: Float[Array, "_ _ K H"], table: Int[Array, "B _"]
) -> Callable:
    """`_reader` of pools of pages: a page is a piece."""

    def take(piece):
        pages = lax.dynamic_index_in_dim(table, piece, axis=1, keepdims=False)
        return tuple(jnp.take(x, pages, axis=0, mode="clip") for x in (k, v))

    return take


def _sees(
    positions: Int[Array, " P"],
    queries: Int[Array, " T"],
    *,
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    causal: bool,
    window: int | None,
    overwritten: Int[Array, " B"] | None,
) -> tuple[Bool[Array, "B P"], Bool[Array, "B T P"]]:
    """The positions that some query may see, and those that each does."""
    in_block = positions - lengths[:, None]
    used = in_block < widths[:, None]
    if overwritten is not None:  # the last position whose slot has a newer one
        used &= positions > overwritten[:, None]
    if window is not None:
        used &= in_block > -window
    ahead = in_block[:, None] - queries[:, None]
    visible = jnp.broadcast_to(used[:, None], ahead.shape)
    if causal:
        visible &= ahead <= 0
    if window is not None:
        visible &= ahead > -window
        if not causal:
            visible &= ahead < window
    return used, visible


def _add(
    sums: Sums,
    rows: Float[Array, "B K R H"],
    keys: Float[Array, "B P K H"],
    values: Float[Array, "B P K H"],
    seen: Bool[Array, "B 1 R P"],
    scale: float,
    softcap: float | None,
) -> Sums:
    """One more piece: the one online-softmax formula."""
    how = {"precision": "highest", "preferred_element_type": jnp.float32}
    scores = rounded(jnp.einsum("BKRH,BPKH->BKRP", rows, keys, **how)) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = rounded(scores)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(sums.top, jnp.max(scores, axis=-1))
    level = jnp.where(top == -jnp.inf, 0, top)  # no -inf less -inf
    weights = rounded(jnp.exp(rounded(scores - level[..., None])))
    kept = jnp.exp(rounded(sums.top - level))
    weight = rounded(sums.weight * kept) + row_sum(weights)[..., 0]
    part = jnp.einsum("BKRP,BPKH->BKRH", weights.astype(values.dtype), values, **how)
    total = rounded(sums.total * kept[..., None]) + rounded(part)
    any_seen = jnp.any(seen, axis=-1)
    return Sums(
        jnp.where(any_seen[..., None], total, sums.total),
        jnp.where(any_seen, weight, sums.weight),
        top,
    )


def _result(sums: Sums, sink: Float[Array, "1 K R"] | None) -> Float[Array, "B K R H"]:
    """The weighted mean, 0 where nothing was seen; a sink is one more logit without a value."""
    total, weight, top = sums
    if sink is not None:
        largest = jnp.maximum(top, sink)
        kept = jnp.exp(rounded(top - largest))
        weight = rounded(weight * kept) + jnp.exp(rounded(sink - largest))
        total = total * kept[..., None]
    return total / jnp.where(weight > 0, weight, 1)[..., None]
