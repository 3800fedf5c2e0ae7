"""Requests to the engine and their results: plain records without arrays.

Nothing here knows text: a caller with the tokenizer makes the prompt's ids, and `texts` watches the
events for stop strings. Several samples of one prompt are requests that differ in their `index`.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from typing import Any, Literal, NamedTuple

from jflash.records.decoding import DRAFT_RULES, GREEDY, Decoding, Sampling, real, whole
from jflash.serving.grammar import Grammar

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
Top = tuple[tuple[int, float], ...]  # the most probable tokens of a place, the likeliest first
MOST = 20  # most probable tokens of a place; OpenAI's limit
BIASED = 320  # tokens with a bias in a request at most; OpenAI's limit is 300
KEYS = 2**32  # seeds and indices are below
STRONGEST = 1e9  # change of a logit, so that changed logits are finite in float32


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to decode; ValueError, naming the field, for values that no model could serve.

    The new tokens end with the first of `stop_ids` (which is among them), or after `max_tokens`.
    Draws depend only on `seed` and `index`; without a seed the engine takes a fresh one. Of waiting
    requests the smallest `priority` runs first, then the oldest. A request that has not ended
    `timeout` seconds after its submission ends with finish reason 'timeout', in any phase. With
    `speculate` false no draft is accepted: each step commits one token.

    The target's logits are changed in this order before a token is chosen: `logit_bias` is added;
    for tokens of the prompt and the text, logits above 0 are divided by `repetition_penalty` and
    others multiplied; `frequency_penalty` is subtracted as often as the text has the token,
    `presence_penalty` once; before `min_tokens` new tokens no stop id is chosen. With `logprobs`
    events have the log-probability of each token by the unchanged logits. Only requests with the
    same `cache_salt` share prefixes.

    Events also have the `top_logprobs` most probable tokens of each place, at most MOST. With
    `logprobs_mode` 'processed' both are of the logits after these changes, temperature and filters.
    With `prompt_logprobs` the first event has those of the prompt's tokens after the first, by the
    unchanged logits, with as many most probable tokens; such a request takes no cached prefix.

    `draft_rule` 'greedy' makes a seed's draws those of plain decoding; 'sampled' accepts more
    drafts. Unless given, it is 'greedy' with a seed, and the pair's without one.

    With a `grammar` the text is a beginning of one that it describes, and a whole one if it ends
    with a stop id.
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
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    draft_rule: str | None = None
    cache_salt: str = ""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, value in _checked_types(self).items():
            object.__setattr__(self, name, value)
        for name in ("seed", "index"):
            if not 0 <= (getattr(self, name) or 0) < KEYS:
                span = f"0 … {KEYS - 1}"
                raise ValueError(f"{name} {getattr(self, name)} must be within {span}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} must be within 0 … max_tokens {self.max_tokens}"
            )
        within, penalty = f"within ±{STRONGEST:g}", self.repetition_penalty
        if not 1 / STRONGEST <= penalty <= STRONGEST:
            span = f"{1 / STRONGEST:g} … {STRONGEST:g}"
            raise ValueError(f"repetition_penalty {penalty} must be above 0, within {span}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not abs(getattr(self, name)) <= STRONGEST:
                raise ValueError(f"{name} {getattr(self, name)} must be a number {within}")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= STRONGEST:
                raise ValueError(f"logit_bias {bias} of token {token} must be a number {within}")
        for name in ("top_logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MOST:
                raise ValueError(f"{name} {getattr(self, name)} must be within 0 … {MOST}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs {self.top_logprobs} needs logprobs")
        for name, known in (
            ("logprobs_mode", ("raw", "processed")),
            ("draft_rule", (None, *DRAFT_RULES)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} must be one of {known}")
        if self.timeout is not None and not 0 < self.timeout <= TIMEOUT_MAX:
            span = f"above 0 seconds, at most {TIMEOUT_MAX:g}; None waits without a limit"
            raise ValueError(f"timeout {self.timeout} must be {span}")

    @property
    def needs_logits(self) -> bool:
        """Whether its tokens need more than the argmax of the unchanged logits."""
        plain = self.repetition_penalty == 1 and not (
            self.frequency_penalty or self.presence_penalty
        )
        plain &= not (self.logit_bias or self.min_tokens or self.logprobs)
        return bool(self.sampling.temperature) or not plain

    @property
    def best_drafts(self) -> bool:
        """Whether it takes the drafter's best tokens, where the pair draws them."""
        if self.draft_rule is None:
            return self.seed is not None
        return self.draft_rule == "greedy"

    @property
    def decoding(self) -> Decoding:
        """The request as the drivers' record."""
        return Decoding(
            max_new_tokens=self.max_tokens,
            stop_token_ids=self.stop_ids,
            sampling=self.sampling,
            seed=self.seed or 0,
            oracle=not self.speculate,
        )


def several(requests: Any) -> Iterable[Request]:
    """The requests, as they come; ValueError for one alone, or for what is none."""
    if isinstance(requests, Request) or not isinstance(requests, Iterable):
        raise ValueError(f"{requests!r:.80} must be a list of requests: put it into [ ]")
    return map(checked_request, requests)


def checked_request(request: Any) -> Request:
    """The request; ValueError for what is none."""
    if not isinstance(request, Request):
        raise ValueError(f"{request!r:.80} must be a Request: jflash.Request(prompt_ids=…)")
    return request


WHOLE = ("max_tokens", "seed", "index", "priority", "min_tokens", "top_logprobs", "prompt_logprobs")
REAL = ("timeout", "repetition_penalty", "frequency_penalty", "presence_penalty")
TYPES: Mapping[str, type] = {
    "sampling": Sampling, "speculate": bool, "logprobs": bool, "cache_salt": str, "grammar": Grammar
}  # fmt: skip
OPTIONAL = ("seed", "timeout", "prompt_logprobs", "grammar")  # may be None


def _checked_types(request: Request) -> dict[str, Any]:
    """The numbers of a request as Python's own; ValueError for a field that holds another type,
    which would otherwise fail later, in the engine's thread."""
    given = {name: getattr(request, name) for name in (*WHOLE, *REAL, *TYPES)}
    given = {n: value for n, value in given.items() if value is not None or n not in OPTIONAL}
    for name, kind in TYPES.items():
        if name in given and not isinstance(given[name], kind):
            raise ValueError(f"{name} {given[name]!r} must be of the type {kind.__name__}")
    try:
        request.cache_salt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"cache_salt {request.cache_salt!r} has no UTF-8: {error}") from None
    if isinstance(request.prompt_ids, Set | Mapping | bytes | bytearray):  # no tokens in order
        raise ValueError(f"prompt_ids {request.prompt_ids!r:.80} must be a list of token ids")
    if not isinstance(request.logit_bias, Mapping):
        raise ValueError(f"logit_bias {request.logit_bias!r} must map tokens to numbers")
    bias = {whole("logit_bias", token): bias for token, bias in request.logit_bias.items()}
    return (
        {name: whole(name, given[name]) for name in WHOLE if name in given}
        | {name: real(name, given[name]) for name in REAL if name in given}
        | {name: _all_whole(name, getattr(request, name)) for name in ("prompt_ids", "stop_ids")}
        | {"logit_bias": {token: real("logit_bias", value) for token, value in bias.items()}}
    )


def _all_whole(name: str, values: Any) -> tuple[int, ...]:
    """Ids may be numbers of NumPy or JAX, too."""
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        raise ValueError(f"{name} must be whole numbers: {error}") from None


class Event(NamedTuple):
    """A request's new tokens of one step; the prefill's token is a separate event without drafts.

    The last event has a `finish_reason`, and may have no tokens. `drafted` counts the drafts that
    had room in the step's block, of which a row budget verifies fewer, `accepted` the accepted
    ones; `cached_tokens` counts the prompt's tokens whose keys and values were cached. `queued` has
    the seconds from the submission until slot and pages were given first, None if none were. These
    two are the same in every event.
    """

    token_ids: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[float, ...] | None = None  # of token_ids, if the request asks for them
    top_logprobs: tuple[Top, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None  # of the prompt's tokens after the first
    prompt_top_logprobs: tuple[Top, ...] | None = None
    version: int = 0  # of the weights, the same in every event
    queued: float | None = None


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
    top_logprobs: list[Top] | None = None
    prompt_logprobs: list[float] | None = None  # of the prompt's tokens after the first
    prompt_top_logprobs: list[Top] | None = None
    version: int = 0  # of the weights; see Engine.update_weights


class TooLong(ValueError):
    """All the engine's pages together never hold a request's prompt and new tokens."""


class Full(Exception):
    """The engine's queue is full: try again later."""


class Failed(Exception):
    """An error of the device, which is the cause, has ended the engine."""
