"""From what the device gave to a request's events. This file reads arrays and starts nothing."""

from collections.abc import Iterator

import numpy as np

from jflash.serving.job import Given, Job, Read
from jflash.serving.packing import Report, Taken, floats, slots_in, taken, tops_of
from jflash.serving.prefill import First
from jflash.serving.request import Event, FinishReason


def keep_prompt_scores(job: Job, given: Given, count: int) -> None:
    """Adds the logprobs of so many tokens of the prompt, which a chunk brings."""
    assert given.scored is not None, "asked for with the chunk"
    chosen, tops = (np.asarray(x)[:count] for x in given.scored)
    job.prompt_logprobs += floats(chosen).tolist()
    if job.request.prompt_logprobs:
        job.prompt_tops += tops_of(tops)


def first_token(job: Job, first: First, index: int) -> Taken:
    """The token that follows a prompt, as a step of one token."""
    array = np.asarray(first.token)[index]
    tops = [tops_of(np.asarray(first.top)[index])] if job.request.top_logprobs else None
    return Taken([[int(array[0])]], [floats(array[2:]).tolist()], bool(array[1]), tops)


def tokens_of_calls(read: Read, report: Report, width: int) -> Iterator[tuple[Job, Taken]]:
    """What a call gave to each of its requests that stepped and have not ended since."""
    numbers = np.asarray(report.numbers)
    tops = None if report.tops is None else np.asarray(report.tops)
    places = {slot: i for i, slot in enumerate(slots_in(numbers, width, read.steps))}
    for job, slot in zip(read.jobs, read.slots, strict=True):
        if job.reason is None and slot in places:
            place, job.stepped = places[slot], True
            likely = None if tops is None else tops[place]
            yield job, taken(numbers[place], likely, width, read.steps)


def gained(job: Job, given: Taken, max_accept: int, version: int) -> Iterator[Event]:
    """Adds the tokens of some steps to the text, and gives their events."""
    for i, ids in enumerate(given.steps):
        drafted = accepted = 0
        if job.begun and job.request.speculate:
            drafted = min(max_accept, job.limit - len(job.tokens))
            accepted = len(ids) - 1
        job.tokens += ids
        if job.matcher is not None:
            job.matcher.take(ids)
        reason: FinishReason | None = None
        if given.done and i == len(given.steps) - 1:
            reason = "stop" if ids[-1] in job.request.stop_ids else "length"
        event = Event(
            tuple(ids), drafted, accepted, job.cached or 0, reason, version=version,
            queued=job.queued,
        )  # fmt: skip
        yield _scored(job, event, given, i)


def _scored(job: Job, event: Event, given: Taken, step: int) -> Event:
    """The event of a step with the numbers that the request asks for."""
    request, new = job.request, {}
    if request.logprobs:
        new["logprobs"] = tuple(given.logprobs[step])
    if request.top_logprobs:
        assert given.tops is not None, "read with the report"
        new["top_logprobs"] = tuple(top[: request.top_logprobs] for top in given.tops[step])
    first = len(job.tokens) == len(request.prompt_ids) + 1
    if first and request.prompt_logprobs is not None:
        new["prompt_logprobs"] = tuple(job.prompt_logprobs)
        if request.prompt_logprobs:
            tops = (top[: request.prompt_logprobs] for top in job.prompt_tops)
            new["prompt_top_logprobs"] = tuple(tops)
    return event._replace(**new) if new else event
