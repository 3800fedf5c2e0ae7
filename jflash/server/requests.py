"""What a client asked, as the engine's requests, with the server's defaults and limits."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from jflash.io.text import mark_ids
from jflash.records.decoding import Sampling
from jflash.server.errors import invalid, unsupported
from jflash.server.protocol import Asked
from jflash.server.service import Service
from jflash.serving.grammar import Grammar
from jflash.serving.request import BIASED, KEYS, Request

# A token as a name, of which it has one: Python reads " 5", "0_5" and other scripts' digits too.
TOKEN = re.compile("0|[1-9][0-9]{0,9}")
MOST_ANSWERS = 128  # of one HTTP request
MOST_STOPS, LONGEST_STOP = 64, 1000  # texts of one request, and characters of one


def sampling_of(asked: Asked, default: Sampling) -> Sampling:
    """A request's sampling; at temperature 0 the filters have no effect and are left out."""
    values: dict[str, Any] = {
        name: getattr(default if getattr(asked, name) is None else asked, name)
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    temperature = values.pop("temperature")
    try:
        # Filters are checked at any temperature: 1 stands for all of them here.
        values["top_k"] = max(values["top_k"], 0)  # -1 keeps all tokens, as 0 does
        drawn = Sampling(temperature=temperature or 1.0, **values)
    except ValueError as error:
        raise invalid(str(error).split(" ", 1)[0], str(error)) from None
    return drawn if temperature else Sampling()


def requests_of(
    service: Service,
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    stops: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    n: int = 1,
    limit_name: str = "max_tokens",
    grammar: Grammar | None = None,
    top_logprobs: int | None = None,
) -> list[Request]:
    """The engine's requests, `n` for each prompt. Without `max_tokens` the context is the limit.

    Those of `stops` that are special tokens end a text by their ids, for no text has them.
    `top_logprobs` None asks for no logprobs at all.
    The `n` samples of a seed differ in their index; each prompt draws as it would alone.
    """
    if max_tokens == 0:
        raise invalid(limit_name, "0 must be at least 1")
    check_count(service, len(prompts), n)
    outside = [i for i in stop_token_ids if i >= service.vocabulary]
    if outside:
        raise invalid("stop_token_ids", f"{outside[0]} is outside the {service.vocabulary} ids")
    if asked.ignore_eos and grammar is not None:
        raise invalid("ignore_eos", "an answer of a given form ends where the form does")
    if asked.prompt_logprobs is not None and asked.stream:
        raise unsupported("prompt_logprobs", "a stream does not give them")
    ends = () if asked.ignore_eos else service.stop_ids
    marks = mark_ids(service.tokenizer, stops)
    stop_ids = tuple(dict.fromkeys((*ends, *stop_token_ids, *marks)))
    sampling = sampling_of(asked, service.sampling)
    seed = None if asked.seed is None else _seed(asked.seed)
    bias, repetition = _bias(asked.logit_bias or {}), asked.repetition_penalty
    try:
        return [
            Request(
                prompt_ids=prompt,
                max_tokens=max_tokens or max(service.engine.max_context - len(prompt), 1),
                stop_ids=stop_ids,
                sampling=sampling,
                seed=seed,
                index=index,
                priority=asked.priority or 0,
                timeout=service.request_timeout,
                speculate=asked.speculation is not False,
                min_tokens=asked.min_tokens or 0,
                logit_bias=bias,
                repetition_penalty=1.0 if repetition is None else repetition,
                frequency_penalty=asked.frequency_penalty or 0.0,
                presence_penalty=asked.presence_penalty or 0.0,
                logprobs=top_logprobs is not None,
                top_logprobs=top_logprobs or 0,
                prompt_logprobs=asked.prompt_logprobs,
                logprobs_mode="raw" if asked.logprobs_mode is None else asked.logprobs_mode,
                draft_rule=asked.draft_rule,
                cache_salt=asked.cache_salt or "",
                grammar=grammar,
            )
            for prompt in prompts
            for index in range(n)
        ]
    except ValueError as error:
        raise invalid(str(error).split(" ", 1)[0], str(error)) from None


def check_count(service: Service, prompts: int, n: int) -> None:
    """ApiError if `n` answers to each of so many prompts are too many for a request."""
    many, fits = "n" if n > 1 else "prompt", service.slots + service.max_queue
    if prompts * n > MOST_ANSWERS:
        raise invalid(many, f"{prompts} prompts × {n}: at most {MOST_ANSWERS} answers")
    if prompts * n > fits:
        at_once = f"{prompts} prompts × {n}: the server takes at most {fits} requests at once"
        raise invalid(many, at_once)


def _bias(given: dict[str, float]) -> dict[int, float]:
    """By token; JSON's names are texts. They are counted before any is read."""
    if len(given) > BIASED:
        raise invalid("logit_bias", f"{len(given)} tokens: at most {BIASED}")
    for name in given:
        if not TOKEN.fullmatch(name):
            why = f"the name {name!r:.40} is no token id: give its number as a text"
            raise invalid("logit_bias", why)
    return {int(name): bias for name, bias in given.items()}


def _seed(seed: int) -> int:
    """Maps any whole number to a seed in the engine's range; seeds within it stay."""
    if 0 <= seed < KEYS:
        return seed
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")


def stops_of(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    if len(stops) > MOST_STOPS:
        raise invalid("stop", f"{len(stops)} texts: at most {MOST_STOPS}")
    if long := [len(text) for text in stops if len(text) > LONGEST_STOP]:
        raise invalid("stop", f"a text of {long[0]} characters: at most {LONGEST_STOP}")
    return stops
