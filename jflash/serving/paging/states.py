"""Which prefixes' recurrent states are copied, and which copies stay.

A recurrent state cannot be cut at a length, and one takes as much memory as the pages of some
hundred to thousands of tokens. So few are kept: a text's last border of pages that a pass over its
prompt ends at anyway, and the border at which it leaves what earlier texts have computed, because
other texts may leave there too. A copy bears the name of the last page before its border. This file
knows names, positions and numbers of places.
"""

from collections.abc import Callable, Sequence

from jflash.pair import Models
from jflash.serving.calls.layout import recurrent
from jflash.serving.paging.pages import Name
from jflash.serving.schedule import passes
from pallas_kernels.block_attention import PAGE

FEWEST = 4  # copies: a talk's last two turns with the borders at which they left the turn before


def states_kept(models: Models, slots: int, asked: int | None = None) -> int:
    """The copies that an engine keeps: as many as are asked for, or one for each slot; none without
    recurrent layers. ValueError for a number that cannot be."""
    if asked is None:
        return max(FEWEST, slots) if recurrent(models) else 0
    if asked < 0:
        raise ValueError(f"states must be at least 0, got {asked}")
    if asked and not recurrent(models):
        raise ValueError(f"states {asked}: no layer is recurrent, so a prefix needs no copies")
    return asked


def borders(found: int, start: int, end: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The positions at which the states of a text are copied while its tokens start … end - 1 are
    computed by passes of `sizes`; its first `found` tokens have pages. All are below `end`."""
    places = {found} if found > start else set()
    ends = [over.end for over in passes(start, (*places, end), sizes, end)]
    last = [at for at in ends if at % PAGE == 0 and at < end]
    return tuple(sorted(places.union(last[-1:])))


def leaving(kept: Sequence[Name], indexed: Callable[[Name], bool]) -> Name:
    """The copy that makes room, of those `kept`, the least recently used first.

    A copy without its pages begins no text until they are computed again, so it goes first.
    """
    return next((name for name in kept if not indexed(name)), kept[0])


class States:
    """Names and places of `count` copies; None: no layer is recurrent, and every prefix will do."""

    def __init__(self, count: int | None) -> None:
        self._every, self.count = count is None, count or 0
        self._place = dict[Name, int]()  # the least recently used first

    def longest(self, names: Sequence[Name], shortened: Callable[[Sequence[Name]], int]) -> int:
        """How many of these first pages of a text end where a copy is, and are not `shortened`."""
        if self._every:
            return shortened(names)
        for count in range(len(names), 0, -1):
            if names[count - 1] in self._place and shortened(names[:count]) == count:
                return count
        return 0

    def use(self, names: Sequence[Name]) -> int | None:
        """The place of the copy that a text begins with whose first pages are these."""
        if self._every or not names:
            return None
        place = self._place[names[-1]] = self._place.pop(names[-1])
        return place

    def keep(self, name: Name, indexed: Callable[[Name], bool]) -> int | None:
        """The place for a new copy; None if there is one of that name, which counts as used."""
        if name in self._place:
            self.use([name])
            return None
        if len(self._place) < self.count:
            place = len(self._place)
        else:
            place = self._place.pop(leaving(list(self._place), indexed))
        self._place[name] = place
        return place

    def forget_all(self) -> None:
        """Forgets all copies, because the weights change or the memory goes."""
        self._place.clear()
