"""What bench-steps times: a shape, a batch and a kind of step. It imports nothing heavy."""

from typing import NamedTuple

# Width 1 without a drafter; the step; the step with the drafter in float8.
KINDS = ("plain", "step", "float8")


class Case(NamedTuple):
    """One program; it is timed at every context."""

    shape: str
    batch: int
    kind: str  # one of KINDS
