"""All that is wrong with a checkpoint's tensors, in one error."""

from pathlib import Path

SHOWN = 20  # problems printed of a checkpoint that does not fit


def check_problems(source: Path, problems: list[str]) -> None:
    """ValueError with all that is wrong with the tensors of `source`, unless nothing is."""
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        listed = "; ".join(problems[:SHOWN] + more)  # with names of the file's choice
        raise ValueError(f"{source} does not fit: {' '.join(listed.split())}")
