"""What bench-steps times: a shape, a batch and a kind of step. It imports nothing heavy."""

from typing import NamedTuple

# Width 1 without a drafter; the step; the step with the drafter in float8. Besides them ROWS, for a
# step that verifies so many rows a sequence.
KINDS = ("plain", "step", "float8")
ROWS = "N-rows"
# Where keys and values lie: in slots of a sequence, in pages one after another, in shuffled pages.
PLACES = ("slots", "pages", "shuffled")


class Case(NamedTuple):
    """One program; it is timed at every context."""

    shape: str
    batch: int
    kind: str  # one of KINDS, or ROWS with a number for its N
    places: str = PLACES[0]
    quantised: str | None = None  # how the target lies in memory, one of shapes.QUANTISED

    @property
    def rows(self) -> int | None:
        """The rows that a step verifies of all sequences together, if not all."""
        count = rows_of(self.kind)
        return None if count is None else count * self.batch


def rows_of(kind: str) -> int | None:
    """N of a kind of ROWS."""
    number = kind.removesuffix(ROWS[1:])
    return int(number) if number != kind and number.isdecimal() and int(number) else None
