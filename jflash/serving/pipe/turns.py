"""What came for requests and was not handed on yet: whoever begins or ends goes first.

An event loop hands on what came for one request at a time, and has other things to do between. If
more comes meanwhile, it joins what its request has already: a late reader reads all at once, which
costs the loop less, and so a loop without enough time catches up.
"""

from typing import Any

# Of a request: the fields of each event, which pickle in a sixth of an event's time, or its error.
What = list[tuple[Any, ...]] | Exception


class Turns:
    """The requests, by their numbers, in the order in which they are handed on."""

    def __init__(self) -> None:
        self._soon, self._later = dict[int, list[What]](), dict[int, list[What]]()

    def __len__(self) -> int:
        return len(self._soon) + len(self._later)

    def add(self, number: int, what: What, soon: bool) -> None:
        """What follows all that came for this request before. `soon`: it goes before the others
        that came, but for those that went soon before it."""
        left = self._soon.get(number)
        if left is None:
            left = self._later.pop(number, []) if soon else self._later.setdefault(number, [])
            if soon:
                self._soon[number] = left
        if left and isinstance(what, list) and isinstance(newest := left[-1], list):
            newest += what
        else:
            left.append(what)

    def pop(self) -> tuple[int, list[What]]:
        """The next request with all that came for it, which is taken off."""
        first = self._soon or self._later
        number = next(iter(first))
        return number, first.pop(number)
