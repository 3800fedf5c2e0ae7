"""The answers of one HTTP request as they are decoded: each step's text, and the usage."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from jflash.server.errors import ApiError, too_late
from jflash.server.metrics import Times
from jflash.server.service import Service
from jflash.serving.grammar import GrammarError
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Failed, Request
from jflash.serving.texts import Reading

Decode = Callable[[list[int]], str]
MOST_AT_ONCE = 16  # steps of one write
EARLY = ("timeout", "cancelled")


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


def steps(
    service: Service,
    handles: Sequence[Handle],
    stops: Sequence[str],
    decode: Decode,
    goes_on: Callable[[Request], Sequence[int]] = lambda _: (),
) -> AsyncGenerator[list[Step]]:
    """The steps of all answers, as they come: lists of those that are there without waiting.

    A call of the engine brings several, and to wait and to write cost more than a step. ApiError
    for a request that the time limit or the engine ended. The caller counts the steps when it gives
    them on, for some may wait for a slow client, and releases the handles. An answer's text goes on
    with that of the tokens that `goes_on` gives for its request.
    """

    def one(answer: int, handle: Handle) -> AsyncGenerator[list[Step]]:
        reading = Reading(handle.request, decode, stops, goes_on(handle.request))
        return _one(service, answer, handle, reading)

    if len(handles) == 1:  # nothing to merge
        return one(0, handles[0])
    return _merged([one(answer, handle) for answer, handle in enumerate(handles)])


async def one_by_one(found: AsyncGenerator[list[Step]]) -> AsyncIterator[Step]:
    """The steps of these lists."""
    async with aclosing(found):
        async for several in found:
            for step in several:
                yield step


async def _merged(answers: Sequence[AsyncGenerator[list[Step]]]) -> AsyncGenerator[list[Step]]:
    came = asyncio.Queue[list[Step] | Exception]()

    async def read(answer: AsyncGenerator[list[Step]]) -> None:
        try:
            async for several in answer:
                came.put_nowait(several)
        except Exception as error:
            came.put_nowait(error)

    readers = [asyncio.create_task(read(answer)) for answer in answers]
    try:
        left = len(readers)
        while left:
            several = await came.get()
            if isinstance(several, Exception):
                raise several
            left -= several[-1].finish is not None
            yield several
    finally:
        for reader in readers:
            reader.cancel()


async def _one(
    service: Service, answer: int, handle: Handle, reading: Reading
) -> AsyncGenerator[list[Step]]:
    request = handle.request
    metrics, prompt_tokens = service.metrics, len(request.prompt_ids)
    begin = last = time.perf_counter()
    first_seconds, tokens, finish, queued = 0.0, 0, None, None
    metrics.began(prompt_tokens)
    try:
        async for events in handle.several(MOST_AT_ONCE):
            now, given = time.perf_counter(), list[Step]()
            for event in events:
                first, queued = not tokens, event.queued
                piece, event = reading.take(event)
                finish = event.finish_reason
                if reading.stopped:
                    handle.cancel()
                metrics.step(event, prompt_tokens, now - last, first)
                first_seconds, last = now - begin if first else first_seconds, now
                tokens += len(event.token_ids)
                if finish not in EARLY:
                    given.append(Step(answer, piece, event, first, finish))
                if finish is not None:
                    break
            if given:
                yield given
            if finish in EARLY:
                raise _ended_early(service, finish)
            if finish is not None:
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
        seconds = time.perf_counter() - begin
        metrics.ended(finish or "abort", request, tokens, Times(queued, first_seconds, seconds))


def _ended_early(service: Service, reason: str) -> ApiError:
    if reason == "cancelled":
        return ApiError("the server is shutting down", status=503, code="shutting_down")
    return too_late(service.request_timeout)
