"""Codes in the order in which a tensor core takes them: the form of `mosaic`'s weights.

A tile is 128 rows of K by 64 columns, and each thread of a warpgroup finds its codes of a tile as
whole words of 32 bits, in the order of wgmma's registers (columns are wgmma's rows). After the
codes lie the tile's scales and, of four bits, what is taken off each code, for every group in it.
So one copy brings all that a tile needs, and no thread asks another one for a code.

Codes of eight bits whose scales are numbers of bfloat16 lie with their bits apart (`_bits_apart`):
a shift and a mask then make bfloat16's of them, 2^-120 times as large, and the scales beside them
are 2^120 times as large.

A gate and an up may lie in pairs: 8 columns of the one, 8 of the other, in turns. A thread's sums
then have both of a column, so that one tile is 32 whole columns of the gated product.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32

from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.kept.quantised import MIDDLE, Quantised

DEPTH, COLUMNS = 128, 64  # of a tile
ROW = 64  # words; what a copy takes has at most 256 along an axis
PAIRED = 8  # columns of a turn; wgmma leaves rows so far apart in one thread
MAGIC = 128  # of bfloat16, whose last bit then counts ones
BIAS = 2.0**120  # between the exponents of float8_e4m3fn and of bfloat16
LARGEST_SCALE = 2.0**8  # of float8 in the narrow form; BIAS times it is no number of bfloat16


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words"],
    meta_fields=["bits", "groups", "narrow", "paired"],
)
@dataclass(frozen=True)
class Fragments:
    """Tiles [N / 64, K / 128, rows, 64] of words; of an abstract weight their shape and dtype.

    Those of experts have an axis before these.
    """

    words: Any
    bits: int  # of a code: 8 of float8_e4m3fn, or 4
    groups: int  # along K in a tile
    narrow: bool  # scales are numbers of bfloat16, and codes of float8 lie as such scales want
    paired: bool = False  # a gate and an up

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, [K, N], or of all experts', [E, K, N]."""
        *lead, columns, depth, _, _ = self.words.shape
        return *lead, depth * DEPTH, columns * COLUMNS

    @property
    def code_rows(self) -> int:
        return DEPTH * COLUMNS * self.bits // 32 // ROW


def refusal(w: Quantised, pieces: int = 1) -> str | None:
    """Why a weight has no such form."""
    *_, K, N = w.shape
    group = w.group
    if K % (DEPTH * pieces) or N % COLUMNS:
        return f"takes pieces of K in {DEPTH}s and columns in {COLUMNS}s, not {K} and {N}"
    if group < K and group % DEPTH and (DEPTH % group or group < 16):
        return f"takes groups of 16 or more that divide {DEPTH} or that it divides, not {group}"
    return None


def abstract(w: Quantised, pairs: Firsts | None = None) -> Fragments:
    """The shapes of `fragments`. ValueError as there."""
    if why := refusal(w):
        raise ValueError(f"the form of fragments {why}")
    *lead, K, N = w.shape
    bits, groups = 4 if w.packed else 8, max(1, DEPTH // w.group)
    rows = DEPTH * COLUMNS * bits // 32 // ROW + groups * (1 + w.packed)
    words = jax.ShapeDtypeStruct((*lead, N // COLUMNS, K // DEPTH, rows, ROW), jnp.uint32)
    narrow = w.scales.dtype == jnp.bfloat16
    return Fragments(words, bits, groups, narrow, pairs is not None)


@functools.partial(jax.jit, static_argnums=1)
def fragments(w: Quantised, pairs: Firsts | None = None) -> Fragments:
    """The same weight in this order; in pairs, if gate and up begin at the columns `pairs`.

    Narrow float8 has scales below LARGEST_SCALE and no code of a NaN. ValueError: it has no such
    order.
    """
    form = abstract(w, pairs)
    if pairs is not None:
        columns = _in_pairs(w.shape[1] // 2, pairs)
        zeros = None if w.zeros is None else w.zeros[:, columns]
        w = Quantised(w.codes[:, columns], w.scales[:, columns], zeros, w.group)
    if len(w.shape) == 3:  # one by one: a word a code is much more memory
        words = lax.map(lambda own: fragments(own).words, w)
        return replace(form, words=words)
    (K, N), packed, groups = w.shape, w.packed, form.groups
    codes = lax.bitcast_convert_type(w.codes, jnp.uint8)
    if packed:
        codes = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(K, N)
    # k = 128·tile + 8·block + 2·lane + pair, n = 64·tile + 16·warp + 8·half + row.
    codes = codes.reshape(K // DEPTH, 16, 4, 2, N // COLUMNS, 4, 2, 8).astype(jnp.uint32)
    codes = codes.transpose(4, 0, 5, 7, 2, 1, 6, 3)  # tiles, warp, row, lane, block, half, pair
    tiles = (N // COLUMNS, K // DEPTH)
    scales = w.scales.astype(jnp.float32)
    if packed:  # four pairs a word, the second of each 16 bits on
        codes = codes.reshape(*tiles, 128, 8, 4, 2)
        shifts = 4 * jnp.arange(4)[:, None] + 16 * jnp.arange(2)
    else:  # two pairs a word
        codes = codes.reshape(*tiles, 128, 16, 2, 2)
        shifts = 16 * jnp.arange(2)[:, None] + 8 * jnp.arange(2)
        if form.narrow:
            codes, shifts, scales = _bits_apart(codes), 16 * jnp.arange(2), scales * BIAS
    words = jnp.sum(codes << shifts.astype(jnp.uint32), axis=(-2, -1), dtype=jnp.uint32)
    # A thread takes four words at once, beside its neighbours' four.
    words = words.reshape(*tiles, 128, -1, 4).swapaxes(2, 3).reshape(*tiles, -1, ROW)
    parts = [words, _by_tile(scales, w.group, K, groups)]
    if packed:
        zeros = jnp.full(w.scales.shape, MIDDLE) if w.zeros is None else w.zeros
        parts.append(_by_tile(MAGIC + zeros.astype(jnp.float32), w.group, K, groups))
    return replace(form, words=jnp.concatenate(parts, axis=2))


def _bits_apart(codes: UInt32[Array, "... halves pair"]) -> UInt32[Array, "... halves pair"]:
    """The bits of two codes in the 16 that they share, of sign, exponent and mantissa: SMMM.EEEE...
    of the first, whose mantissa a shift by 8 brings behind its exponent, and ....S...  .EEEEMMM of
    the second, which a shift by 4 brings to its place.
    """
    first, second = codes[..., 0, :], codes[..., 1, :]
    first = (first & 0x80) << 8 | (first & 0x78) << 4 | (first & 7) << 12
    second = (second & 0x80) << 4 | second & 0x7F
    return jnp.stack([first, second], axis=-2)


def _in_pairs(columns: int, pairs: Firsts) -> Array:
    """The columns of a weight in the order of pairs."""
    turns = jnp.arange(columns).reshape(-1, 1, PAIRED)
    return (turns + jnp.asarray(pairs)[:, None]).ravel()


def _by_tile(numbers: Array, group: int, K: int, groups: int) -> UInt32[Array, "N k g 64"]:
    """Each tile's numbers [G, N] as words, a group that spans tiles in each of them."""
    steps = K // DEPTH * groups
    first = jnp.minimum(jnp.arange(steps) * (DEPTH // groups) // group, len(numbers) - 1)
    taken = numbers[first].reshape(K // DEPTH, groups, -1, COLUMNS).transpose(2, 0, 1, 3)
    return lax.bitcast_convert_type(taken, jnp.uint32)
