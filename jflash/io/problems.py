"""One error for all problems of a checkpoint's tensors."""

from pathlib import Path

SHOWN = 20  # problems that an error lists


def check_problems(source: Path, problems: list[str]) -> None:
    """ValueError with the problems of the tensors of `source`, if there are any."""
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        # Names come from the file, and may hold line breaks.
        listed = "; ".join(problems[:SHOWN] + more)
        raise ValueError(f"{source} does not fit: {' '.join(listed.split())}")
