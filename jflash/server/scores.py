"""Logprobs in the forms of OpenAI's API, from an event's numbers. This file knows no route."""

import math
from collections.abc import Sequence
from typing import Any

from jflash.io.incremental import Incremental
from jflash.server.service import Service
from jflash.serving.request import STRONGEST, Event, Request, Top

LEAST = -9999.0  # stands for minus infinity, which JSON lacks


def chat_logprobs(service: Service, event: Event) -> dict[str, Any] | None:
    """The `logprobs` of a choice of chat completions; None if the request asks for none."""
    if event.logprobs is None:
        return None
    tops = event.top_logprobs or ((),) * len(event.logprobs)
    content = [
        _entry(service, token, number)
        | {"top_logprobs": [_entry(service, other, x) for other, x in top]}
        for token, number, top in zip(event.token_ids, event.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(service: Service, token: int, number: float) -> dict[str, Any]:
    given = service.token_bytes(token)
    return {"token": _shown(given), "logprob": _finite(number), "bytes": list(given)}


def _shown(given: bytes) -> str:
    """A token's text; part of a character is shown by its bytes, as OpenAI does."""
    try:
        return given.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in given)


def _finite(number: float) -> float:
    return number if math.isfinite(number) else LEAST


def scoring(request: Request) -> Request:
    """A request for the numbers of its prompt alone: the last token is its one new token, so the
    prompt may fill the context. `whole_prompt` puts them together."""
    if len(request.prompt_ids) < 2:
        return request
    *before, last = request.prompt_ids
    most = request.prompt_logprobs
    numbers: dict[str, Any] = {}
    if most is not None:
        bias = {last: STRONGEST}
        numbers = dict(logprobs=True, top_logprobs=most, prompt_logprobs=most, logit_bias=bias)
    return Request(
        prompt_ids=before, max_tokens=1, priority=request.priority, timeout=request.timeout,
        cache_salt=request.cache_salt, **numbers,
    )  # fmt: skip


def whole_prompt(request: Request, ids: Sequence[int], event: Event) -> Event:
    """The first event of `scoring` with the numbers of the prompt `ids`."""
    if len(ids) == len(request.prompt_ids) or event.prompt_logprobs is None:
        return event
    tops = (event.prompt_top_logprobs or ()) + (event.top_logprobs or ())
    return event._replace(
        prompt_logprobs=(*event.prompt_logprobs, *(event.logprobs or ())),
        prompt_top_logprobs=tops or None,
    )


class CompletionLogprobs:
    """The `logprobs` of one choice of completions, whose text grows; offsets count characters."""

    def __init__(self, service: Service, prompt: Sequence[int]) -> None:
        self._service, self._offset = service, 0
        self._text = Incremental(service.plain_text, before=prompt)

    def prompt(
        self, ids: Sequence[int], event: Event, most: int, unseen: int = 0
    ) -> dict[str, Any]:
        """Those of an echoed prompt, whose first token has none, with `most` likeliest tokens. The
        first `unseen` ones have no part in its text."""
        numbers = (None, *(event.prompt_logprobs or ()))
        likely: list[Top | None] = [None] * len(ids)
        if most:
            likely[1:] = [top[:most] for top in event.prompt_top_logprobs or ()]
        text = Incremental(self._service.echo)
        offsets = [self._offset] * unseen + self._offsets(text, ids[unseen:])
        self._offset += len(text.push([], last=True))
        return self._body(ids, numbers, likely, offsets)

    def step(self, event: Event) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        tops = event.top_logprobs or (None,) * len(event.logprobs)
        return self._body(
            event.token_ids, event.logprobs, tops, self._offsets(self._text, event.token_ids)
        )

    def _offsets(self, text: Incremental, ids: Sequence[int]) -> list[int]:
        """Where each token's text begins, as far as the text has it: a part of a character begins
        with the character, and what the text leaves out has no length."""
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(text.push([token], last=False))
        return offsets

    def _body(
        self,
        ids: Sequence[int],
        numbers: Sequence[float | None],
        tops: Sequence[Top | None],
        offsets: list[int],
    ) -> dict[str, Any]:
        texts = [_shown(self._service.token_bytes(token)) for token in ids]
        likely = [
            None if top is None or number is None else self._likely(token, number, top)
            for token, number, top in zip(ids, numbers, tops, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [None if x is None else _finite(x) for x in numbers],
            "top_logprobs": likely,
            "text_offset": offsets,
        }

    def _likely(self, token: int, number: float, top: Top) -> dict[str, float]:
        """The most probable tokens and the one that was chosen, by their text."""
        shown = {_shown(self._service.token_bytes(i)): _finite(x) for i, x in top}
        return shown | {_shown(self._service.token_bytes(token)): _finite(number)}


def joined(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The logprobs of a whole answer, of those of its steps."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    lists = {name: value for name, value in known[0].items() if isinstance(value, list)}
    return known[0] | {name: [x for part in known for x in part[name]] for name in lists}


def prompt_logprobs(
    service: Service, ids: Sequence[int], event: Event, most: int | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each of the prompt's tokens after the first its number and the `most`
    likeliest; None unless the request asks for them."""
    if most is None or event.prompt_logprobs is None:
        return None
    tops = event.prompt_top_logprobs or ((),) * len(event.prompt_logprobs)
    found: list[dict[str, Any] | None] = [None]
    for token, number, top in zip(ids[1:], event.prompt_logprobs, tops, strict=True):
        ranked: dict[int, tuple[float, int | None]] = {}
        ranked |= {other: (x, rank) for rank, (other, x) in enumerate(top[:most], 1)}
        ranked.setdefault(token, (number, None))
        found.append(
            {
                str(other): {
                    "logprob": _finite(x), "rank": rank,
                    "decoded_token": _shown(service.token_bytes(other)),
                }
                for other, (x, rank) in ranked.items()
            }
        )  # fmt: skip
    return found
