"""Whose the pages are: a free list, holders counted, and prefixes found again by their tokens.

A page whose positions are all committed may be named by the chain of its tokens, and stays
findable after its last holder has gone, until its place is needed: the one unused longest goes
first. By the law a page found is the page computed, bit for bit. Knows numbers of pages only.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from pallas_kernels.block_attention import PAGE

Name = bytes


def chain(tokens: Sequence[int], salt: bytes, known: Sequence[Name] = ()) -> list[Name]:
    """The names of the whole pages of a text; `known` are those of its beginning.

    A name is SHA-256 of the name before, the salt at first, and of the page's tokens.
    """
    names = list(known)
    for i in range(len(names), len(tokens) // PAGE):
        before = names[-1] if names else hashlib.sha256(salt).digest()
        page = np.asarray(tokens[i * PAGE : (i + 1) * PAGE], "<i4").tobytes()
        names.append(hashlib.sha256(before + page).digest())
    return names


class Pages:
    """`count` pages. A page is free, held by one or more, or kept: named and held by none."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))[::-1]
        self._holders = [0] * count
        self._name: list[Name | None] = [None] * count
        self._page = dict[Name, int]()
        self._kept = OrderedDict[int, None]()

    @property
    def available(self) -> int:
        """How many pages `take` can give."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """How many of the available pages a text can still find."""
        return len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """Pages of no content, held once; None, and nothing changes, if there are too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
            self._free.append(page)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def find(self, names: Iterable[Name]) -> list[int]:
        """The pages of the longest known beginning of a chain; they are not held by this."""
        found = []
        for name in names:
            if name not in self._page:
                break
            found.append(self._page[name])
        return found

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for pages that `find` gave just now."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def held_by_one(self, pages: Iterable[int]) -> int:
        """How many of them would be available if their holder went."""
        return sum(self._holders[page] == 1 for page in pages)

    def held(self, pages: Iterable[int]) -> int:
        """How many of them somebody holds."""
        return sum(self._holders[page] > 0 for page in pages)

    def name(self, page: int, name: Name) -> None:
        """Makes a held page findable, unless another page has that content already."""
        assert self._holders[page] > 0, f"page {page} is held by none"
        if name not in self._page and self._name[page] is None:
            self._page[name], self._name[page] = page, name

    def release(self, pages: Sequence[int]) -> None:
        """One holder less. The last page of a text is the first whose place is given away."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released once too often"
            if not self._holders[page]:
                if self._name[page] is None:
                    self._free.append(page)
                else:
                    self._kept[page] = None

    def forget_all(self) -> None:
        """No page can be found any more: the weights have changed."""
        for page in list(self._kept):
            self._free.append(page)
        self._kept.clear()
        for page, name in enumerate(self._name):
            if name is not None:
                self._forget(page)

    def _forget(self, page: int) -> None:
        name = self._name[page]
        assert name is not None
        del self._page[name]
        self._name[page] = None
