"""What is dispatched of prompts: how many chunks, by which passes, and which together."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from jflash.compiled.shape import LARGE_CHUNK
from jflash.serving.calls.pass_sizes import Several
from jflash.serving.schedule import Pass, passes
from jflash.serving.thread.device_time import PROMPTS
from jflash.serving.thread.holdings import Holdings
from jflash.serving.thread.job import Job, Read
from jflash.serving.thread.prompt_passes import PromptPasses


class Prompts:
    """Dispatches passes over texts; used by the loop's thread, and `count` is the loop's.

    At most `burst` chunks run between two calls of steps, and once the device has shown how long
    one takes, only as many as fit into `stall` seconds, at least one.
    """

    def __init__(
        self,
        passes: PromptPasses,
        holdings: Holdings,
        count: Callable[..., None],
        burst: int = 4,
        stall: float = math.inf,
    ) -> None:
        self.passes, self.device, self.holdings = passes, passes.device, holdings
        self.burst, self.stall = burst, stall
        self._count = count

    @property
    def smallest(self) -> int:
        """The tokens of a chunk."""
        return min(self.device.programs.chunk)

    @property
    def each(self) -> int:
        """The chunks of one text that run before a call of steps, at most: those of a large one,
        or of a wider pass that may run now."""
        sizes, smallest = self.device.programs.chunk, self.smallest
        return max(LARGE_CHUNK, *(x for x in sizes if x // smallest <= self.now)) // smallest

    @property
    def now(self) -> int:
        """The chunks of the smallest size that may run now between two calls of steps. A small one
        takes more than its part of a large one's time, so whole large ones count if any fits."""
        sizes, known = sorted(self.device.programs.chunk), False
        for size in reversed(sizes):
            if seconds := self._lasted(size):
                known, fit = True, min(self.stall / seconds, self.burst)
                if fit >= 1:
                    return min(self.burst, int(fit) * (size // sizes[0]))
        return 1 if known else self.burst

    def _lasted(self, size: int) -> float:
        """The seconds of a pass of so many tokens, alone or as one of several, whichever is less:
        one that did not run for long may have waited then; 0: unknown."""
        time, several = self.device.time, (each[:2] for each in self.passes.several)
        each = [
            time.lasted(PROMPTS, prompts * tokens) / prompts
            for prompts, tokens in ((1, size), *several)
            if tokens == size
        ]
        return min(filter(None, each), default=0.0)

    def together(self, tokens: int) -> int:
        """The prompts of so many tokens whose ends one program computes at most."""
        sizes = self.device.programs.chunk
        if tokens > max(sizes):
            return 1
        *_, last = passes(0, (tokens,), list(sizes), tokens)
        return next((each.prompts for each in self.passes.several if each.takes(last.size)), 1)

    def dispatch(self, chunks: Sequence[Job]) -> list[Read]:
        """Dispatches chunks of texts in their order; `chunks` has a text once for each."""
        texts = [
            [(job, over) for over in self._passes(job, len(list(run)))]
            for job, run in itertools.groupby(chunks)
            if job.slot is not None
        ]
        return [read for some in self._together(self._in_order(texts)) for read in some]

    def _in_order(self, texts: Sequence[Sequence[tuple[Job, Pass]]]) -> list[tuple[Job, Pass]]:
        """The passes over these texts in their order, but that one which a single pass ends joins
        those before it whose program has room for it."""
        joined, last = list[tuple[Several, list[int]]](), dict[Several, list[int]]()
        for i, text in enumerate(texts):
            several = self.passes.together(*text[0]) if len(text) == 1 else None
            if several is None:
                continue
            if len(last.get(several, ())) in (0, several.prompts):
                last[several] = []
                joined.append((several, last[several]))
            last[several].append(i)
        first = {i: at[0] for several, at in joined if len(at) >= several.least for i in at}
        order = sorted(range(len(texts)), key=lambda i: first.get(i, i))
        return [each for i in order for each in texts[i]]

    def _passes(self, job: Job, chunks: int) -> Iterable[Pass]:
        """The passes for so many chunks of a text, which stop where its states are copied."""
        ends = (*job.borders, job.end)
        return passes(job.computed, ends, list(self.device.programs.chunk), chunks)

    def _together(self, every: Sequence[tuple[Job, Pass]]) -> Iterable[list[Read]]:
        """Dispatches passes in their order, some of them in one program."""
        together = lambda each: self.passes.together(*each)  # noqa: E731
        for several, run in itertools.groupby(every, together):
            some = list(run)
            for count in counts(len(some), several):
                sizes = several and (several[:2] if count > 1 else (1, some[0][1].size))
                yield self._compute(some[:count], sizes)
                some = some[count:]

    def _compute(
        self, some: Sequence[tuple[Job, Pass]], sizes: tuple[int, int] | None
    ) -> list[Read]:
        """Dispatches these passes as one program: of `sizes` if it chooses first tokens too."""
        size = sizes[1] if sizes else some[0][1].size
        tables = [self.holdings.table(job, job.computed, job.computed + size) for job, _ in some]
        tokens = sum(over.end - job.computed for job, over in some)
        if sizes:
            reads = self.passes.whole(some, sizes, tables, self.holdings.no_pages)
        else:
            reads = [self.passes.chunk(*some[0], tables[0])]
        self._count(chunks=1, computed=tokens)
        for job, _ in some:
            self.holdings.name(job, job.computed)
            place = self.holdings.place(job)
            if place is not None:
                self.passes.keep(job, place)
        return reads


def counts(passes: int, several: Several | None) -> Iterator[int]:
    """How many of so many passes each program computes."""
    while passes:
        fitting = min(passes, several.prompts) if several else 1
        count = fitting if several and fitting >= several.least else 1
        yield count
        passes -= count
