"""One error for all problems of a checkpoint's tensors."""

from pathlib import Path

SHOWN = 20  # problems that an error lists


def check_problems(source: Path, problems: list[str]) -> None:
    """ValueError with the problems of the tensors of `source`, if there are any."""
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        listed = "; ".join(
            problems[:SHOWN] + more
        )  # names come from the file: they may hold line breaks
        raise ValueError(f"{source} does not fit: {' '.join(listed.split())}")
