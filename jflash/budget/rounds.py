"""What a step costs as a part of an engine's round, by the rows that it verifies.

In a round the host dispatches prompts and a call of steps while the device computes what was
dispatched before it, and the slower of the two is what the round takes. So a step that is shorter
on the device gains nothing where the host is slower. This file knows no device, clock or draft.

Axis: N numbers of rows, in the order of the steps' times.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

KEPT = 0.9  # weight of earlier rounds, after each


class Step(NamedTuple):
    """Milliseconds of a step with nothing beside it."""

    ms: float  # by the clock; the next call is dispatched while one runs
    dispatch: float = 0.0  # the host's


class Round(NamedTuple):
    """Milliseconds from the end of one call to that of the next, while there was work to do."""

    wall: float  # by the clock
    host: float  # that it had taken however fast the device were, at least
    prompts: float = 0.0  # in which the device computed prompts, for certain, and steps
    steps: float = 0.0


class Rounds:
    """Means of recent rounds, and what they say of rounds with other numbers of rows."""

    def __init__(self, steps: Mapping[int, Step]) -> None:
        self._place = {rows: i for i, rows in enumerate(steps)}
        self._times = np.array(list(steps.values()))  # [N, 2]
        self._sums = np.zeros(8)

    def add(self, rows: int, seen: Round, steps: int, tokens: float) -> None:
        """Takes in a round whose call made `steps` steps of so many rows, and `tokens` tokens."""
        own = steps * self._times[self._place[rows]]
        self._sums = KEPT * self._sums + np.array([*seen, *own, tokens, steps])

    def ms(self, tokens: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Milliseconds that a step takes as a part of a round, where it makes so many tokens.

        A round is the longer one of the host's and the device's work, and what nobody explains.
        Prompts are as many as the tokens ask for. Before the first round these are the steps alone.
        """
        ms, dispatch = self._times.T
        if not self._sums[-1]:
            return ms
        wall, host, prompts, certain, own, dispatched, made = self._sums[:-1] / self._sums[-1]
        # Texts may be longer or shorter than those of the times.
        pace = max(min(own, wall - prompts), certain) / own
        unknown = max(wall - _longer(host, pace * own + prompts), 0.0)
        of_device = pace * ms + prompts * tokens / max(made, 1e-9)
        of_host = host + dispatch - dispatched
        return unknown + _longer(of_host, of_device)


def _longer(host: Any, device: Any) -> Any:
    """What two works take beside each other: the longer one, and a fifth more if both are equal,
    because each waits for the other now and then."""
    return (np.maximum(host, 0.0) ** 4 + device**4) ** 0.25
