"""The tile of each canonical product: the one that a driver preferred, else the rule's.

Tiles change no bit of a result. So a driver may time `candidates` on its device and `prefer` the
fastest, before or after other programs were compiled. This file times nothing and knows no files.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

from pallas_kernels.matmul.few_columns import COLUMNS as OF_FEW
from pallas_kernels.matmul.few_columns import FewColumns
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.narrow import few_columns_sizes, few_rows_sizes, narrow_tuning
from pallas_kernels.matmul.tuning import (
    COLUMNS,
    HEADS,
    LEAST_SWIZZLE,
    SHORT_K,
    SMS,
    WALKED,
    WASTE,
    Tuning,
    canonical_tuning,
    make_plan,
    with_ring,
)
from pallas_kernels.matmul.wide_mosaic import ROWS, Wide, in_turns, one_turn

FEW_ROWS = 64
# By Pallas-Triton, or by one of the Mosaic GPU kernels.
AnyTile = Tile | FewColumns | Tuning | Wide


class Product(NamedTuple):
    """A call's op and sizes; N counts w's columns, and K is cut in `pieces`.

    "pieces" is a product whose consumer adds its pieces, "residual" one that adds a residual.
    """

    op: str
    M: int
    K: int
    N: int
    pieces: int

    @classmethod
    def of(cls, op: str, M: int, K: int, N: int, pieces: int) -> "Product":
        """Numbers of rows that fill the same tiles are one product."""
        rows = max(16, 1 << (M - 1).bit_length()) if M <= FEW_ROWS else -(-M // 64) * 64
        return cls(op, rows, K, N, pieces)

    @property
    def columns(self) -> int:
        """Of the result: gate and up are two halves of w."""
        return self.N // 2 if self.op == "gate_up" else self.N


_preferred: dict[Product, AnyTile] = {}
_wanted: ContextVar[set[Product] | None] = ContextVar("wanted", default=None)


def prefer(product: Product, tile: AnyTile) -> None:
    """From here on programs that are traced take this tile."""
    _preferred[product] = tile


def preferred() -> dict[Product, AnyTile]:
    """All tiles that were preferred so far."""
    return dict(_preferred)


def unsettled(products: Iterable[Product]) -> list[Product]:
    """Those without a preferred tile, in order."""
    return sorted(product for product in products if product not in _preferred)


@contextlib.contextmanager
def wanted() -> Iterator[set[Product]]:
    """Yields the products without a preferred tile that this thread traces inside."""
    products: set[Product] = set()
    token = _wanted.set(products)
    try:
        yield products
    finally:
        _wanted.reset(token)


def tile_for(product: Product) -> AnyTile:
    """ValueError: no kernel serves the shape."""
    if product in _preferred:
        return _preferred[product]
    products = _wanted.get()
    if products is not None:
        products.add(product)
    return by_rule(product)


def by_rule(product: Product) -> AnyTile:
    """A tile by sizes alone. ValueError: no kernel serves the shape."""
    if product.M <= FEW_ROWS or _no_swizzle(product):
        return few_columns_tile(product) or few_rows_tile(product)
    if _odd(product):
        return in_turns(product.K)
    op = "matmul" if product.op == "pieces" else product.op
    wide = wide_tile(product)
    return wide or narrow_tuning(op, *product[1:], canonical_tuning(op, *product[1:]))


def _no_swizzle(product: Product) -> bool:
    """Whether a head's ids are no whole tiles of 8, by which Mosaic's kernel copies them."""
    return product.op in HEADS and product.N % 8 > 0


def _odd(product: Product) -> bool:
    """Whether a plain product has columns that are no whole swizzles, even of the least bytes."""
    plain = product.op in ("matmul", "pieces") and product.pieces == 1
    return plain and product.N % LEAST_SWIZZLE > 0


def wide_tile(product: Product) -> Wide | None:
    """If it takes one turn and fills it: of 65 to 128 rows for gate and up, and for products whose
    columns are not whole swizzles of 128 bytes, and of 129 to 256 for several pieces of a short K.
    Else None."""
    op, M, K, N, pieces = product
    row_tiles, halves = -(-M // ROWS), 2 if op == "gate_up" else 1
    if row_tiles == 1:
        serves = op == "gate_up" or (op == "matmul" and pieces == 1 and N % COLUMNS > 0)
    else:
        serves = pieces > 1 and M <= WALKED and K <= SHORT_K
    if M <= FEW_ROWS or not serves:
        return None
    tile = one_turn(K, product.columns, halves, row_tiles=row_tiles, pieces=pieces)
    if tile and op == "gate_up" and tile.width < NARROWEST:
        return None
    return tile if tile and _FULL <= row_tiles * -(-product.columns // tile.width) <= SMS else None


def few_columns_tile(product: Product) -> FewColumns | None:
    """For a product whose result is its sums, if it has few columns and a long K."""
    op, M, K, N, pieces = product
    sums = op in ("matmul", "pieces") or (op == "residual" and pieces > 1)
    if not sums or N % OF_FEW or K % pieces:
        return None
    sizes = few_columns_sizes(M, K // pieces, N // OF_FEW * pieces)
    return FewColumns(slots=sizes[0], deep=sizes[1]) if sizes else None


def few_rows_tile(product: Product, whole: bool = False) -> Tile:
    """`whole`: the last tile has all columns too. ValueError: no tile divides the shape."""
    op, M, K, _, pieces = product
    rows = min(FEW_ROWS, M)
    if op.startswith("head_"):
        return Tile(rows=rows, columns=64, depth=128 if K % 128 == 0 else 64)
    waste = 0 if whole or op == "gate_up" else product.columns // WASTE
    width = next((c for c in (64, 32, 16) if -product.columns % c <= waste), None)
    if width is None or K % (64 * pieces):
        what = f"[{M}, {K}] by {product.columns} columns"
        raise ValueError(f"canonical {op}: no tile divides {what}")
    if product.columns % 64 == 0 and not whole:
        sizes = few_rows_sizes(op, rows, K // pieces, product.columns // 64 * pieces)
        if sizes:
            return _tile(rows, *sizes)
    return Tile(rows=rows, columns=width, depth=64, stages=4 if op == "gate_up" else 6)


def _tile(rows: int, columns: int, depth: int, stages: int, warps: int) -> Tile:
    return Tile(rows=rows, columns=columns, depth=depth, stages=stages, warps=warps)


# For few rows a program's columns, step over K, stages and warps; for many, by the most rows that
# they are for, a CTA's rows, columns and step, and the cluster that shares loads.
_FEW = ((64, 64, 6, 4), (64, 128, 4, 8), (32, 128, 4, 4), (128, 64, 4, 4))
_MANY = {
    128: (
        *((64, 64, 128, 1, 1), (64, 128, 64, 1, 1), (64, 192, 64, 1, 1), (128, 64, 64, 1, 1)),
        *((128, 64, 64, 1, 2), (128, 128, 64, 1, 1), (128, 192, 64, 1, 1)),
    ),
    256: (
        *((64, 128, 64, 1, 1), (128, 64, 64, 1, 1), (128, 64, 64, 1, 2), (128, 128, 64, 1, 1)),
        *((128, 128, 64, 1, 2), (128, 192, 64, 1, 1)),
    ),
    math.inf: (
        *((64, 256, 64, 1, 1), (64, 256, 64, 2, 1), (128, 128, 64, 1, 1), (128, 128, 64, 2, 1)),
        *((128, 192, 64, 1, 1), (128, 192, 64, 2, 1), (128, 256, 64, 1, 1), (128, 256, 64, 2, 1)),
    ),
}
_FULL = 96  # CTAs
NARROWEST = 64  # of gate and up: with 48 columns a part of Qwen3-8B's takes 53 µs, in 64 x 256 46


def candidates(product: Product) -> list[AnyTile]:
    """Tiles worth timing, the rule's first."""
    rule = by_rule(product)
    found = [rule]
    if product.M <= 2 * FEW_ROWS:
        found += _few_rows_candidates(product)
    if product.M > FEW_ROWS and not (_odd(product) or _no_swizzle(product)):
        general = "matmul" if product.op == "pieces" else product.op
        found += [canonical_tuning(general, *product[1:]), *_many_rows_candidates(product)]
    if product.op == "pieces":  # what a consumer pays for several is not seen in their product
        found = [tile for tile in found if _several(tile) == _several(rule)]
    return list(dict.fromkeys(found))


def _several(tile: AnyTile) -> bool:
    return isinstance(tile, Tile | FewColumns) or (isinstance(tile, Tuning) and tile.split_k > 1)


def _few_rows_candidates(product: Product) -> Iterator[Tile]:
    op, M, K, _, pieces = product
    for columns, depth, stages, warps in _FEW:
        whole = op in HEADS or product.columns % columns == 0
        if whole and K % (pieces * depth) == 0:
            yield _tile(M, columns, depth, stages, warps)


def _many_rows_candidates(product: Product) -> Iterator[Tuning]:
    """Those that fill the GPU; a CTA takes all pieces of K, or if that leaves too few, one."""
    op, M, K, N, pieces = product
    shapes = next(shapes for most, shapes in _MANY.items() if most >= M)
    for block_m, block_n, step, cluster_m, cluster_n in shapes:
        for walk in sorted({pieces, 1}, reverse=True):
            tuning = with_ring(op, block_m, block_n, walk, pieces // walk, step)
            if tuning is None:
                continue
            tuning = dataclasses.replace(tuning, cluster_m=cluster_m, cluster_n=cluster_n)
            try:
                plan = make_plan("matmul" if op == "pieces" else op, M, K, N, tuning)
            except ValueError:
                continue
            if plan.columns * plan.row_groups * cluster_m * cluster_n >= _FULL:
                yield tuning
                break
