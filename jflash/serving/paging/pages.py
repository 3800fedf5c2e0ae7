"""The owners of pages: a free list, reference counts, and a prefix index by tokens.

A page whose positions are all committed may be named by the hash chain of its tokens. It stays in
the index after its last holder has gone, until its memory is needed: the least recently used page
goes first. By the law an indexed page has the bits of a computed one. This file knows only numbers
of pages.
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
        """The number of pages that `take` can give."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """The number of available pages that are still in the index."""
        return len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """Pages without content, held once; None, without any change, if there are too few."""
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
        """The pages of the longest indexed prefix of a chain; this does not hold them."""
        pages = []
        for name in names:
            if name not in self._page:
                break
            pages.append(self._page[name])
        return pages

    def find_each(self, names: Iterable[Name]) -> list[int]:
        """The pages of those names that are indexed; this does not hold them."""
        return [self._page[name] for name in names if name in self._page]

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that `find` has just returned."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def held_by_one(self, pages: Iterable[int]) -> int:
        """The number of `pages` that would be available without their holder."""
        return sum(self._holders[page] == 1 for page in pages)

    def held(self, pages: Iterable[int]) -> int:
        """The number of `pages` with a holder."""
        return sum(self._holders[page] > 0 for page in pages)

    def name(self, page: int, name: Name) -> None:
        """Indexes a held page, unless another page has that content already."""
        assert self._holders[page] > 0, f"page {page} is held by none"
        if name not in self._page and self._name[page] is None:
            self._page[name], self._name[page] = page, name

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder. The last page of a text is the first to be reused."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released once too often"
            if not self._holders[page]:
                if self._name[page] is None:
                    self._free.append(page)
                else:
                    self._kept[page] = None

    def forget_all(self) -> None:
        """Empties the index, because the weights have changed."""
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
