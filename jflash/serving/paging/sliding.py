"""The pages of layers with windows: those that left the window of their text return to the pool.

Such layers have separate pools and a table, whose pages bear the same names as the others' and
are shared alike. A prefix counts only as far as all that its next token sees is there. This file
knows positions and numbers of pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jflash.serving.calls.slots import Window
from jflash.serving.paging.pages import Name, Pages
from pallas_kernels.block_attention import PAGE


@dataclass
class Held:
    """A text's pages by their column."""

    pages: dict[int, int] = field(default_factory=dict)


class Sliding:
    """The pools of the layers with windows; nothing is kept without such layers."""

    def __init__(self, window: Window | None) -> None:
        self._window = window
        self.pages = Pages(window.pages if window else 0)

    def shortened(self, names: Sequence[Name]) -> int:
        """How many of these first pages of a text leave all that the next token sees."""
        if self._window is None:
            return len(names)
        for count in range(len(names), 0, -1):
            seen = names[self._first(count * PAGE) : count]
            if len(self.pages.find_each(seen)) == len(seen):
                return count
        return 0

    def admit(self, names: Sequence[Name]) -> Held:
        """Holds what a text sees whose first pages are these."""
        if self._window is None or not names:
            return Held()
        first = self._first(len(names) * PAGE)
        found = self.pages.find_each(names[first:])
        self.pages.hold(found)
        return Held(dict(enumerate(found, first)))

    def slide(self, held: Held, position: int, columns: int) -> bool:
        """Moves on to rows from `position` on, up to the end of the first `columns` columns;
        whether that changes what is held."""
        if self._window is None:
            return False
        first = self._first(position)
        gone = [column for column in sorted(held.pages) if column < first]
        self.pages.release([held.pages.pop(column) for column in gone])
        missing = [column for column in range(first, columns) if column not in held.pages]
        fresh = self.pages.take(len(missing))
        assert fresh is not None, "the pool is large enough for all slots"
        held.pages |= zip(missing, fresh, strict=True)
        return bool(gone or missing)

    def name(self, held: Held, names: Sequence[Name]) -> None:
        """Indexes the pages among a text's first ones, which have these names."""
        for column, page in held.pages.items():
            if column < len(names):
                self.pages.name(page, names[column])

    def leave(self, held: Held) -> None:
        """Releases a text's pages."""
        self.pages.release([held.pages.pop(column) for column in sorted(held.pages)])

    def row(self, held: Held, columns: int) -> np.ndarray:
        """The row of the table; empty without such layers."""
        if self._window is None:
            return np.zeros(0, np.int32)
        row = np.full(columns, self.pages.count, np.int32)
        row[: min(held.pages, default=0)] = 0  # before the window: read by no row
        row[list(held.pages)] = list(held.pages.values())
        return row

    def _first(self, position: int) -> int:
        """The first column that the row at `position` sees."""
        assert self._window is not None
        return max(0, position - self._window.size + 1) // PAGE
