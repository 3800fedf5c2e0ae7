"""One CTA's work in the walk of the gated delta rule: a head's columns over a call's rows."""

import functools
from typing import Any, NamedTuple

from pallas_kernels.gated_delta import mosaic_rule as rule
from pallas_kernels.gated_delta.grid import CHUNK
from pallas_kernels.gated_delta.mosaic_rule import RESIDUES, Lane
from pallas_kernels.gated_delta.mosaic_stages import ROWS, STAGES, Head, Sizes, Stages
from pallas_kernels.gated_delta.mosaic_values import (
    Int,
    at,
    integer,
    least,
    load,
    loop,
    most,
    number,
    select,
    store,
    when,
)

TOGETHER = 4  # rows of one turn of the loop: one's numbers come while the other's are added


class Call(NamedTuple):
    """What a CTA works on: a block of a head's columns, of sequence b and its slot's memory."""

    block: Int
    h: Int
    b: Int
    slot: Int
    base: Int
    ahead: Int
    real: Int
    kept: Int


class Walk:
    """Tiles are this thread's numbers of the state."""

    def __init__(self, sizes: Sizes, call: Call, lane: Lane, arrays: list[Any], staged: Any):
        self.sizes, self.call, self.lane = sizes, call, lane
        q, *rows = arrays[:5]
        *self.earlier, self.state, self.out = arrays[5:]
        self.head = Head(sizes, call.h)
        given = (call.block, call.b, call.real, staged, q, *rows)
        self.stages = Stages(self.head, lane, *given)
        self.moved = integer(0) < call.ahead + call.kept  # else the state is that which lies there

    def run(self) -> None:
        call, tiles = self.call, self._begun()
        for i in range(STAGES - 1):
            self.stages.begin(integer(i))
        tiles = loop(integer(0), call.ahead, 1, self._replayed, tiles)
        tiles = loop(integer(0), self.stages.chunks, 1, self._answered, tiles)
        with when(call.kept.is_(call.real) & self.moved):
            self._keep(tiles)
        loop(call.real, integer(self.sizes.T), 1, self._padded, [])

    def _begun(self) -> list[Any]:
        begin = at(self.state, self._tile)
        return [x for i in self._keys for x in load(begin, i * self.sizes.dv, 2)]

    def _keep(self, tiles: list[Any]) -> None:
        begin = at(self.state, self._tile)
        for i, pair in zip(self._keys, zip(tiles[::2], tiles[1::2], strict=True), strict=True):
            store(begin, pair, i * self.sizes.dv)

    @property
    def _keys(self) -> range:
        return range(0, self.sizes.dk, RESIDUES)

    @property
    def _tile(self) -> Int:
        """Where this thread's numbers of the slot's state begin."""
        _, _, Hv, dk, dv = self.sizes
        first = (self.call.slot * integer(Hv) + self.call.h) * integer(dk * dv)
        return first + self.lane.residue * integer(dv) + self.lane.column

    def _replayed(self, i: Int, tiles: list[Any]) -> list[Any]:
        """The state after a row of the memory."""
        (k, v, g, beta), head, lane = self.earlier, self.head, self.lane
        place = (self.call.base + i) % integer(2 * CHUNK)
        row = self.call.slot * integer(2 * CHUNK) + place
        key = at(k, head.key(row, lane.residue))
        keys = [load(key, n)[0] for n in self._keys]
        value = load(at(v, head.value(row, lane.column)), count=2)
        decay, weight = (load(at(x, head.number(row)))[0] for x in (g, beta))
        return rule.step(tiles, keys, value, rule.exp(decay), weight)

    def _answered(self, chunk: Int, tiles: list[Any]) -> list[Any]:
        """The state after a chunk's rows: those that stay, and those that may be rolled back."""
        self.stages.wait(chunk)
        call, first = self.call, chunk * integer(ROWS)
        count = least(call.real - first, integer(ROWS))
        stay = most(least(call.kept - first, count), integer(0))

        def part(turn: Int, tiles: list[Any]) -> list[Any]:
            before = turn.is_(integer(0))
            begin, end = select(before, integer(0), stay), select(before, stay, count)
            whole = begin + (end - begin) // integer(TOGETHER) * integer(TOGETHER)
            some = functools.partial(self._some, chunk)
            tiles = loop(begin, whole, TOGETHER, functools.partial(some, TOGETHER), tiles)
            tiles = loop(whole, end, 1, functools.partial(some, 1), tiles)
            here = before & stay.is_(call.kept - first) & (call.kept < call.real)
            with when(here & self.moved):
                self._keep(tiles)
            return tiles

        return loop(integer(0), integer(2), 1, part, tiles)

    def _some(self, chunk: Int, count: int, i: Int, tiles: list[Any]) -> list[Any]:
        """The state after rows i … i + count - 1 of a chunk, whose outputs it writes."""
        for n, row in enumerate(self.stages.rows(chunk, i, count)):
            tiles = rule.step(tiles, row.key, row.value, row.decay, row.weight)
            place = chunk * integer(ROWS) + i + integer(n)
            self._write(place, rule.seen(row.query, tiles))
        return tiles

    def _padded(self, i: Int, _: list[Any]) -> list[Any]:
        self._write(i, [number(0.0)] * 2)
        return []

    def _write(self, i: Int, numbers: list[Any]) -> None:
        row = self.call.b * integer(self.sizes.T) + i
        with when(self.lane.residue.is_(integer(0))):
            store(at(self.out, self.head.value(row, self.lane.column)), numbers)
