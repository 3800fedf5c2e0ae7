"""The requests' pages: which each holds, the prefix that it shares, its row of the page tables.

This file knows requests and numbers of pages, and no device.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jflash.pair import Models
from jflash.serving.calls.layout import Layout, recurrent
from jflash.serving.calls.pass_sizes import copying_sizes
from jflash.serving.calls.slots import sliding
from jflash.serving.calls.some_slots import places
from jflash.serving.paging.pages import Name, Pages, chain
from jflash.serving.paging.sliding import Held, Sliding
from jflash.serving.paging.states import States, borders
from jflash.serving.thread.job import Job
from pallas_kernels.block_attention import PAGE

FORMER = 3  # drafters whose pages texts without drafts still find


class Holdings:
    """The pages of one layout, the tables that calls bring, and the prefixes' recurrent states."""

    def __init__(self, models: Models, layout: Layout, salt: bytes) -> None:
        self.pages, self.sliding = Pages(layout.page_count), Sliding(sliding(models, layout))
        self.states = States(layout.states if recurrent(models) else None)
        self._sizes = copying_sizes(models, layout.shape)
        self._first = self._salt = salt
        self._columns = layout.columns
        self._former = deque[bytes](maxlen=FORMER)
        self.steps = layout.steps  # of the next round, at most
        self._width = models.block_size  # tokens that a step may add
        self._none = np.full(layout.columns, layout.page_count, np.int32)
        self._none = np.append(self._none, self.sliding.row(Held(), layout.columns))
        self._tables = np.tile(self._none, (layout.slots, 1))
        self._written = [([0], 0)] * layout.slots  # the pages in each row, and how many
        self._layout = layout

    def new_drafter(self, version: int) -> None:
        """Pages of the drafter before have a context of another drafter. Only texts without drafts,
        which never use a context, begin with them from now on."""
        self._former.appendleft(self._salt)
        self._salt = b"drafter %d, " % version + self._first  # a request's own salt comes after it

    def forget_all(self) -> None:
        """Empties the prefix index, because the weights change or the pages go."""
        self._former.clear()
        self.pages.forget_all()
        self.sliding.pages.forget_all()
        self.states.forget_all()

    def needs(self, job: Job) -> int:
        """The pages for the next round, whose steps follow those that the host has not read."""
        ahead = (job.unread + self.steps) * self._width + (not job.begun)
        return -(-min(job.limit, len(job.tokens) + ahead) // PAGE)

    def short(self, job: Job) -> int:
        """The pages that it lacks for the next round."""
        return max(0, self.needs(job) - len(job.pages))

    def fresh(self, job: Job) -> tuple[int, int]:
        """The available pages that its admission would take, and the cached tokens."""
        cached = self._cached(job)
        return self.needs(job) - self.pages.held(cached), len(cached) * PAGE

    def admit(self, job: Job) -> bool:
        """Gives it pages, the cached ones first; False if there are too few by now."""
        found = self._found(job)
        cached = self._usable(job, found)
        self.pages.hold(cached)
        fresh = self.pages.take(self.needs(job) - len(cached))
        if fresh is None:
            self.pages.release(cached)
            return False
        job.seen = self.sliding.admit(job.names[: len(cached)])
        job.pages, job.named = [*cached, *fresh], len(cached)
        job.computed = len(cached) * PAGE
        job.origin = self.states.use(job.names[: len(cached)])
        job.borders = ()
        if self.states.count:
            job.borders = borders(len(found) * PAGE, job.computed, job.to_compute, self._sizes)
        return True

    def place(self, job: Job) -> int | None:
        """Where the states are copied that it has now; None if they are not, or are there."""
        if job.computed not in job.borders:
            return None
        self._chain(job, job.computed)
        name = job.names[job.computed // PAGE - 1]
        return self.states.keep(name, lambda one: bool(self.pages.find_each([one])))

    def grow(self, job: Job) -> None:
        """Gives it the pages that it lacks for the next round."""
        more = self.pages.take(self.needs(job) - len(job.pages))
        assert more is not None, "the plan counted the pages"
        job.pages += more

    def name(self, job: Job, computed: int) -> None:
        """Indexes the pages whose tokens are all among the first `computed` ones."""
        whole = min(computed // PAGE, len(job.pages))
        if whole <= job.named and not job.seen.pages:
            return
        self._chain(job, max(whole, len(job.names)) * PAGE)
        for i in range(job.named, whole):
            self.pages.name(job.pages[i], job.names[i])
        self.sliding.name(job.seen, job.names[:whole])
        job.named = max(job.named, whole)

    def leave(self, job: Job) -> None:
        """Takes its pages.

        Dispatched calls may still write them; their next holder's calls are dispatched later.
        """
        self.pages.release(job.pages)
        self.sliding.leave(job.seen)
        job.pages = []

    @property
    def no_pages(self) -> Int[np.ndarray, "1 _"]:
        """A table that names no page."""
        return self._none[None]

    def table(self, job: Job, position: int, end: int) -> Int[np.ndarray, "1 _"]:
        """The table for a chunk of the rows from `position` to `end`."""
        self._slide(job, position, end)
        assert job.slot is not None
        return self._tables[job.slot : job.slot + 1].copy()

    def tables(
        self, jobs: Sequence[Job], given: int
    ) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, "n _"]]:
        """The `given` slots of the next call of these, as `some_slots.places` has them, and their
        tables."""
        for job in jobs:
            self._slide(job, len(job.tokens) - 1, len(job.pages) * PAGE)
        slots = places([job.slot for job in jobs], given, self._layout)
        return slots, np.where(slots[:, None] >= 0, self._tables[slots], self._none)

    def _slide(self, job: Job, position: int, end: int) -> None:
        """Moves the pages of layers with windows on, and writes the table's row if it changes."""
        moved = self.sliding.slide(job.seen, position, min(-(-end // PAGE), len(job.pages)))
        assert job.slot is not None
        pages, count = self._written[job.slot]
        if pages is job.pages and count == len(pages) and not moved:
            return
        self._written[job.slot] = job.pages, len(job.pages)
        row = self._none.copy()
        row[: len(job.pages)] = job.pages
        row[self._columns :] = self.sliding.row(job.seen, self._columns)
        self._tables[job.slot] = row

    def _cached(self, job: Job) -> list[int]:
        """The cached pages that it may begin with."""
        return self._usable(job, self._found(job))

    def _found(self, job: Job) -> list[int]:
        """The cached pages of its text; the last token is always computed, and all of a prompt
        whose logprobs are asked."""
        end = job.to_compute
        if job.request.prompt_logprobs is not None and not job.begun:
            return []
        most = (end - 1) // PAGE
        if self._former and not job.request.speculate:
            # New pages follow in the chain that it begins with: where its first ones lack a
            # context, no text with drafts comes to the later ones.
            chains = [self._names(job, end, salt) for salt in (self._salt, *self._former)]
            job.names = max(chains, key=lambda names: len(self.pages.find(names[:most])))
        self._chain(job, end - end % PAGE)
        return self.pages.find(job.names[:most])

    def _usable(self, job: Job, found: list[int]) -> list[int]:
        """Those of them after which layers with windows and recurrent layers can go on."""
        return found[: self.states.longest(job.names[: len(found)], self.sliding.shortened)]

    def _chain(self, job: Job, tokens: int) -> None:
        """Names the pages of its first `tokens` tokens."""
        job.names = self._names(job, tokens, self._salt, job.names)

    def _names(self, job: Job, tokens: int, salt: bytes, known: Sequence[Name] = ()) -> list[Name]:
        return chain(job.tokens[:tokens], salt + job.request.cache_salt.encode(), known)
