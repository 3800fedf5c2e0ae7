"""What comes after the error of a write that failed.

Orbax raises the error of one array and closes its event loop, while tensorstore still writes the
others. When these end they call into the loop, and Python prints a traceback for each, also below
the line that the command has printed and while it exits.
"""

import sys
from collections.abc import Callable
from typing import Any


class _Dropped:
    """A hook for what cannot be raised, which passes on all but such calls."""

    def __init__(self, usual: Callable[[Any], Any]) -> None:
        self.usual = usual

    def __call__(self, dropped: Any) -> None:
        if "Event loop is closed" not in str(dropped.exc_value):
            self.usual(dropped)


def drop_late_callbacks() -> None:
    """From now on the process prints nothing for them. A second call changes nothing."""
    if not isinstance(sys.unraisablehook, _Dropped):
        sys.unraisablehook = _Dropped(sys.unraisablehook)
