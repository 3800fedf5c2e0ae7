"""What a caller asks of the engine and what comes back. Plain records: they name no array.

Text is not known here: whoever has the tokenizer makes the prompt's ids, watches the events for
stop strings, and cancels. Several samples of one prompt are requests that differ by their `index`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jflash.decoding import GREEDY, Decoding, Sampling

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
KEYS = 2**32  # seeds and indices are below


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to decode; ValueError, naming the field, for values that no model could serve.

    The new tokens end with the first of `stop_ids` (which is among them), or after `max_tokens`.
    Draws depend on `seed` and `index` alone; without a seed the engine takes a fresh one. Of those
    that wait, the smallest `priority` runs first, then the oldest. A request that has not ended
    `timeout` seconds after it was submitted ends with finish reason 'timeout', whatever it was
    doing. With `speculate` false no draft is accepted: each step commits one token.
    """

    prompt_ids: Sequence[int]
    max_tokens: int = 256
    stop_ids: Sequence[int] = ()
    sampling: Sampling = GREEDY
    seed: int | None = None
    index: int = 0
    priority: int = 0
    timeout: float | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        for name in ("seed", "index"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 0 <= value < KEYS):
                raise ValueError(f"{name} {value} must be a whole number within 0 … {KEYS - 1}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout {self.timeout} must be above 0 seconds")

    @property
    def decoding(self) -> Decoding:
        """The same as the drivers take it."""
        return Decoding(
            max_new_tokens=self.max_tokens,
            stop_token_ids=self.stop_ids,
            sampling=self.sampling,
            seed=self.seed or 0,
            oracle=not self.speculate,
        )


class Event(NamedTuple):
    """What one step gave a request; the prefill's token is an event of its own, without drafts.

    The last event has a `finish_reason`, and may have no tokens. `drafted` counts the drafts that
    the step verified, `accepted` those among them that were kept; `cached_tokens` counts the tokens
    of the prompt whose keys and values were there before, the same number in every event.
    """

    token_ids: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A request that has ended. `acceptance_lengths` has the tokens that each step committed;
    len(token_ids) = 1 + sum(acceptance_lengths), because the prefill gives the first token."""

    prompt_tokens: int
    token_ids: list[int]
    acceptance_lengths: list[int]
    finish_reason: FinishReason
    cached_tokens: int = 0


class Full(Exception):
    """The engine's queue holds as many requests as it may: try again later."""


class Failed(Exception):
    """The engine ended by an error of the device, which is the cause."""
