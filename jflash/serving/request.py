"""What a caller asks of the engine and what comes back. Plain records: they name no array.

Text is not known here: whoever has the tokenizer makes the prompt's ids, watches the events for
stop strings, and cancels. Several samples of one prompt are requests that differ by their `index`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    The target's logits are changed in this order before a token is chosen: `logit_bias` is added;
    what is above 0 is divided by `repetition_penalty`, else multiplied, for tokens of the prompt
    and the text; `frequency_penalty` is subtracted as often as the text has the token,
    `presence_penalty` once; before `min_tokens` new tokens no stop id is chosen. With `logprobs`
    events have the log-probability of each token by the logits as they were before all that.
    Prefixes are found again only by requests of the same `cache_salt`.
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
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: bool = False
    cache_salt: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        for name in ("seed", "index"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 0 <= value < KEYS):
                raise ValueError(f"{name} {value} must be a whole number within 0 … {KEYS - 1}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} must be within 0 … max_tokens {self.max_tokens}"
            )
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty {self.repetition_penalty} must be above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name)} must be a number")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias {bias} of token {token} must be a number")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout {self.timeout} must be above 0 seconds")

    @property
    def needs_logits(self) -> bool:
        """Whether its tokens are more than the best ones of the logits as they are."""
        plain = self.repetition_penalty == 1 and not (
            self.frequency_penalty or self.presence_penalty
        )
        plain &= not (self.logit_bias or self.min_tokens or self.logprobs)
        return bool(self.sampling.temperature) or not plain

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
    logprobs: tuple[float, ...] | None = None  # of token_ids, if the request asks for them


@dataclass(frozen=True, kw_only=True)
class Result:
    """A request that has ended. `acceptance_lengths` has the tokens that each step committed;
    len(token_ids) = 1 + sum(acceptance_lengths), because the prefill gives the first token."""

    prompt_tokens: int
    token_ids: list[int]
    acceptance_lengths: list[int]
    finish_reason: FinishReason
    cached_tokens: int = 0
    logprobs: list[float] | None = None  # of token_ids, if the request asks for them


class Full(Exception):
    """The engine's queue holds as many requests as it may: try again later."""


class Failed(Exception):
    """The engine ended by an error of the device, which is the cause."""
