"""A call's rows on their way through shared memory, some at a time and the next ones ahead."""

from typing import Any, NamedTuple

from pallas_kernels.gated_delta import mosaic_values as values
from pallas_kernels.gated_delta.mosaic_rule import COLUMNS, RESIDUES, THREADS, Lane, exp
from pallas_kernels.gated_delta.mosaic_values import Int, at, integer, least, load, store, when

ROWS, STAGES = 16, 3  # rows that come at once, and how often there is room for so many


class Sizes(NamedTuple):
    """Rows of a call, heads and their widths."""

    T: int
    Hk: int
    Hv: int
    dk: int
    dv: int

    @property
    def query(self) -> int:
        """Where queries lie in a stage after the keys, in numbers; then values, decays, weights."""
        return ROWS * self.dk

    @property
    def value(self) -> int:
        return 2 * self.query

    @property
    def decay(self) -> int:
        return self.value + ROWS * COLUMNS

    @property
    def weight(self) -> int:
        return self.decay + ROWS

    @property
    def stage(self) -> int:
        """The numbers of a stage."""
        return self.weight + ROWS


class Head(NamedTuple):
    """A value head's numbers in arrays of rows: of its key head, of itself, and its own one."""

    sizes: Sizes
    h: Int

    def key(self, row: Int, number: Int) -> Int:
        head = self.h // integer(self.sizes.Hv // self.sizes.Hk)
        return (row * integer(self.sizes.Hk) + head) * integer(self.sizes.dk) + number

    def value(self, row: Int, column: Int) -> Int:
        return (row * integer(self.sizes.Hv) + self.h) * integer(self.sizes.dv) + column

    def number(self, row: Int) -> Int:
        return row * integer(self.sizes.Hv) + self.h


class Row(NamedTuple):
    """What a thread reads of a row: its residue of query and key, its columns of the value."""

    query: list[Any]
    key: list[Any]
    value: list[Any]
    decay: Any
    weight: Any


class Stages(NamedTuple):
    """The rows of sequence `b`, `real` of them, in chunks of ROWS; chunk c comes to stage
    c % STAGES. `staged` is the shared memory, and the others are arrays."""

    head: Head
    lane: Lane
    block: Int
    b: Int
    real: Int
    staged: Any
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any

    @property
    def chunks(self) -> Int:
        return (self.real + integer(ROWS - 1)) // integer(ROWS)

    def stage(self, chunk: Int) -> Any:
        return at(self.staged, (chunk % integer(STAGES)) * integer(self.head.sizes.stage))

    def begin(self, chunk: Int) -> None:
        """Begins to copy a chunk's rows, if there are any; rows past the last are the last."""
        sizes, thread, stage = self.head.sizes, self.lane.thread, self.stage(chunk)

        def row(n: Int) -> Int:
            row = least(chunk * integer(ROWS) + n, integer(sizes.T - 1))
            return self.b * integer(sizes.T) + row

        def pieces(width: int, of: int) -> tuple[Int, Int]:
            """A row, and the first number of one of its parts of 16 bytes."""
            piece = thread + integer(of * THREADS)
            return piece // integer(width // 4), piece % integer(width // 4) * integer(4)

        with when(chunk < self.chunks):
            for i in range(ROWS * sizes.dk // (4 * THREADS)):
                n, number = pieces(sizes.dk, i)
                to = at(stage, n * integer(sizes.dk) + number)
                source = self.head.key(row(n), number)
                values.copy(to, at(self.k, source), 16)
                values.copy(at(to, integer(sizes.query)), at(self.q, source), 16)
            n, column = pieces(COLUMNS, 0)
            with when(n < integer(ROWS)):
                to = at(stage, integer(sizes.value) + n * integer(COLUMNS) + column)
                first = self.block * integer(COLUMNS)
                values.copy(to, at(self.v, self.head.value(row(n), first + column)), 16)
            with when(thread < integer(ROWS)):
                for place, array in ((sizes.decay, self.g), (sizes.weight, self.beta)):
                    to = at(stage, integer(place) + thread)
                    values.copy(to, at(array, self.head.number(row(thread))), 4)
        values.commit()

    def wait(self, chunk: Int) -> None:
        """Waits for a chunk, makes its decays e^g, and begins to copy the one whose stage is free
        since the last one was read."""
        values.arrived(STAGES - 2)
        values.together()
        self.begin(chunk + integer(STAGES - 1))
        with when(self.lane.thread < integer(ROWS)):
            place = at(self.stage(chunk), integer(self.head.sizes.decay) + self.lane.thread)
            store(place, [exp(load(place)[0])])
        values.together()

    def rows(self, chunk: Int, i: Int, count: int) -> list[Row]:
        """Rows i … i + count - 1 of a chunk."""
        sizes, stage, lane = self.head.sizes, self.stage(chunk), self.lane
        numbers = range(0, sizes.dk, RESIDUES)
        key = at(stage, i * integer(sizes.dk) + lane.residue)
        value = at(stage, integer(sizes.value) + i * integer(COLUMNS) + lane.in_block)
        number = at(stage, i)
        return [
            Row(
                [load(key, sizes.query + n * sizes.dk + x)[0] for x in numbers],
                [load(key, n * sizes.dk + x)[0] for x in numbers],
                load(value, n * COLUMNS, 2),
                *(load(number, place + n)[0] for place in (sizes.decay, sizes.weight)),
            )
            for n in range(count)
        ]
