"""One error for all problems of a checkpoint's tensors."""

from pathlib import Path

SHOWN = 20  # problems printed of a checkpoint that does not fit


def check_problems(source: Path, problems: list[str]) -> None:
    """ValueError with the problems of the tensors of `source`, if there are any."""
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        listed = "; ".join(problems[:SHOWN] + more)  # with names of the file's choice
        raise ValueError(f"{source} does not fit: {' '.join(listed.split())}")
