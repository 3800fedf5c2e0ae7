"""The answers of one HTTP request as they are decoded: each step's text, and the usage."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from jflash.io.incremental import Incremental
from jflash.server.errors import ApiError
from jflash.server.service import Service
from jflash.serving.grammar import GrammarError
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Failed

Decode = Callable[[list[int]], str]


class Step(NamedTuple):
    """One step of one of the answers; `finish` is None until its last step."""

    answer: int
    text: str
    event: Event
    first: bool
    finish: str | None


@dataclass
class Usage:
    """Tokens of all answers so far, `each` of them to one prompt."""

    prompt: int
    each: int = 1
    cached: int = 0
    new: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    reasoning: int = 0

    def add(self, step: "Step") -> None:
        event, first = step.event, step.first
        # Of several answers to a prompt the later ones may find what the first one computed.
        self.cached += event.cached_tokens if first and step.answer % self.each == 0 else 0
        self.new += len(event.token_ids)
        self.drafted += event.drafted
        self.accepted += event.accepted
        self.steps += not first and bool(event.token_ids)

    def body(self) -> dict[str, Any]:
        """OpenAI's form; verified drafts are its predictions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
                "reasoning_tokens": self.reasoning,
            },
        }


async def steps(
    service: Service, handles: Sequence[Handle], stops: Sequence[str], usage: Usage, decode: Decode
) -> AsyncIterator[Step]:
    """The steps of all answers, as they come; counts them in `usage`.

    ApiError for a request that the time limit or the engine ended. The caller releases the handles.
    """
    if len(handles) == 1:  # nothing to merge
        async with aclosing(_one(service, 0, handles[0], stops, decode)) as only:
            async for step in only:
                usage.add(step)
                yield step
        return
    came = asyncio.Queue[Step | Exception]()

    async def read(answer: int, handle: Handle) -> None:
        try:
            async for step in _one(service, answer, handle, stops, decode):
                came.put_nowait(step)
        except Exception as error:
            came.put_nowait(error)

    readers = [asyncio.create_task(read(i, handle)) for i, handle in enumerate(handles)]
    try:
        left = len(readers)
        while left:
            step = await came.get()
            if isinstance(step, Exception):
                raise step
            # Usage counts steps as they are sent: several may wait for a slow client.
            usage.add(step)
            left -= step.finish is not None
            yield step
    finally:
        for reader in readers:
            reader.cancel()


async def _one(
    service: Service, answer: int, handle: Handle, stops: Sequence[str], decode: Decode
) -> AsyncGenerator[Step]:
    request = handle.request
    text = Incremental(decode, stops, request.min_tokens)
    metrics, prompt_tokens = service.metrics, len(request.prompt_ids)
    begin = last = time.perf_counter()
    first_seconds, tokens, finish = 0.0, 0, None
    metrics.began(prompt_tokens)
    try:
        async for event in handle:
            now = time.perf_counter()
            first, reason = not tokens, event.finish_reason
            shown = event.token_ids
            if reason == "stop" and shown:  # by its stop id, of which the answer has no text
                shown = shown[:-1]
            piece = text.push(shown, last=reason is not None)
            if text.stopped:
                handle.cancel()
                event, reason = _cut(event, text.taken), "stop"
            metrics.step(event, prompt_tokens, now - last, first)
            first_seconds, last = now - begin if first else first_seconds, now
            tokens += len(event.token_ids)
            if reason in ("timeout", "cancelled"):
                finish = reason
                raise _ended_early(service, reason)
            finish = reason
            yield Step(answer, piece, event, first, reason)
            if reason is not None:
                return
    except GrammarError as error:
        finish = "error"
        raise ApiError(
            f"the form is too complex for this text: {error}", code="invalid_grammar"
        ) from None
    except Failed as error:
        finish = "error"
        raise service.failed(error) from None
    finally:
        metrics.ended(finish or "abort", tokens, first_seconds, time.perf_counter() - begin)


def _cut(event: Event, count: int) -> Event:
    """The event of the first `count` tokens, with which plain decoding would have ended."""
    return event._replace(
        token_ids=event.token_ids[:count],
        accepted=min(event.accepted, max(count - 1, 0)),
        logprobs=event.logprobs and event.logprobs[:count],
        top_logprobs=event.top_logprobs and event.top_logprobs[:count],
    )


def _ended_early(service: Service, reason: str) -> ApiError:
    if reason == "cancelled":
        return ApiError("the server is shutting down", status=503, code="shutting_down")
    return ApiError(
        f"the request took longer than {service.request_timeout:g} seconds", status=408,
        code="timeout", headers={"x-should-retry": "false"},
    )  # fmt: skip
