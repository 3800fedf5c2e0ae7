"""The ways to decode the same texts, and how much of each the law is checked on.

A way is a program (width, batch, capacity, chunk, with the drafter or without) and the modes that
it runs in.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from jflash.budget.row_choice import WIDTHS
from jflash.pair import Models
from jflash.proof.faults import FAULTS, HYBRIDS, Fault

MODES = ("plain", "own drafter", "other drafter", "replay")
CHUNKS = (128, 64)
LONG_CHUNKS = (256, 512)  # what engines of small and of large targets take


class Way(NamedTuple):
    """A program and its modes; with "plain" there is no drafter, and no other mode."""

    width: int
    batch: int
    modes: tuple[str, ...]
    roomy: bool = False  # twice the capacity
    chunk: int = CHUNKS[0]
    rows: int | None = None  # that a step verifies, if not all

    def named(self, mode: str) -> str:
        extra = (
            (", twice the capacity" if self.roomy else "")
            + (f", chunks of {self.chunk}" if self.chunk != CHUNKS[0] else "")
            + ("" if self.rows is None else f", {self.rows} rows verified")
        )
        return f"width {self.width}, batch {self.batch}{extra}: {mode}"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How much is decoded, and in which ways."""

    tokens: int  # of the texts, at least
    anchored: int  # of them by width 1 and batch 1; others by the first way of several texts
    new_tokens: int  # of a text, at most
    ways: tuple[Way, ...]
    long_chunks: tuple[int, ...] = ()  # of prompts that are longer than these

    @property
    def batch(self) -> int:
        return max(way.batch for way in self.ways)

    def comparisons(self, models: Models) -> int:
        """Every mode, texts given as prompts, and the planted faults."""
        modes = sum(len(way.modes) for way in self.fitting(models).ways)
        prompted = 1 + 2 * len(self.long_chunks)
        return modes + prompted + len(self.planted_in(models))

    def fitting(self, models: Models) -> "Form":
        """The form for a pair: no way is wider than its block, and rows are chosen if they can."""
        ways = [way for way in self.ways if models.one_arithmetic or way.rows is None]
        width = models.block_size
        return replace(self, ways=tuple(w._replace(width=min(w.width, width)) for w in ways))

    def planted_in(self, models: Models) -> tuple[Fault, ...]:
        """The faults to plant in a pair's target."""
        return FAULTS + (HYBRIDS if models.target.config.deltas else ())


PLAIN, OWN, OTHER, REPLAY = ((mode,) for mode in MODES)
WHOLE = Form(
    tokens=10_000,
    anchored=2_000,
    new_tokens=160,
    long_chunks=LONG_CHUNKS,
    ways=(
        Way(1, 64, PLAIN),
        Way(1, 8, PLAIN, roomy=True, chunk=64),
        Way(4, 1, OWN + REPLAY),
        Way(8, 1, OWN),
        Way(16, 1, OWN + OTHER),
        Way(16, 8, OWN + OTHER + REPLAY, roomy=True),
        Way(16, 32, OWN, chunk=64),
        Way(16, 32, OWN + REPLAY, rows=96),
        *(Way(16, 32, OWN, rows=32 * each) for each in WIDTHS),
        Way(16, 64, OWN + OTHER + REPLAY),
    ),
)
# A third of the programs, on longer texts.
GPU = Form(
    tokens=20_000,
    anchored=2_000,
    new_tokens=320,
    long_chunks=LONG_CHUNKS,
    ways=(
        Way(1, 8, PLAIN, roomy=True, chunk=64),
        Way(5, 8, OWN + REPLAY),
        Way(16, 32, OWN + REPLAY, rows=96),
        Way(16, 64, OWN + OTHER + REPLAY),
    ),
)
CPU = Form(
    tokens=360,
    anchored=360,
    new_tokens=64,
    ways=(
        Way(1, 8, PLAIN, roomy=True, chunk=64),
        Way(4, 1, OWN),
        Way(8, 4, OTHER + REPLAY, chunk=64, rows=13),
        Way(16, 8, OWN + REPLAY, roomy=True),
    ),
)
