"""The checkpoints of a training, whose errors are a line each.

Orbax writes while the training goes on: it raises the error of a checkpoint at the next one, or
when it is closed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import orbax.checkpoint as ocp

from jflash.io.foreign import without_notes

CHECKPOINTS = "checkpoints"  # in the folder of a training
KEPT = 2  # so that one is whole whenever the run is killed


@contextlib.contextmanager
def checkpoints_in(directory: Path) -> Iterator[ocp.CheckpointManager]:
    """The checkpoints of the training in `directory`, all written when the block has ended.

    ValueError if they cannot be, as `saving` has it.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
    manager = ocp.CheckpointManager(directory / CHECKPOINTS, options=options)
    try:
        yield manager
    finally:
        with saving(directory):
            manager.close()


@contextlib.contextmanager
def saving(directory: Path) -> Iterator[None]:
    """Turns what Orbax raises where a checkpoint cannot be written into a ValueError in words."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = without_notes(" ".join(str(error).split()))
        raise ValueError(
            f"cannot write {directory / CHECKPOINTS}: {why}. The same command goes on from the "
            "newest whole checkpoint when it can be written"
        ) from error
