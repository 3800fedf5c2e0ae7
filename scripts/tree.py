"""Runs a command of this tree's jflash, whether or not that or another one is installed."""

import sys
from pathlib import Path


def run(name: str) -> None:
    """Ends with the exit code of `jflash NAME`, with this process's arguments."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from jflash.cli import main

    sys.exit(main.run(name))
