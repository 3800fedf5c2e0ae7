"""From what the device gave to a request's events. This file reads arrays and starts nothing."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jflash.serving.calls.packing import Report, Taken, all_taken, floats, tops_of
from jflash.serving.calls.prefill import First
from jflash.serving.request import Event
from jflash.serving.thread.job import Given, Job, Read


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
    scored = any(job.request.logprobs for job in read.jobs)
    found = all_taken(report, width, read.steps, scored)
    for job, slot in zip(read.jobs, read.slots, strict=True):
        if job.reason is None and slot in found:
            job.stepped = True
            yield job, found[slot]


class Gain(NamedTuple):
    """The steps that a text has gained, and the tokens that it had before them."""

    job: Job
    given: Taken
    before: int

    @property
    def begins(self) -> bool:
        """Whether the text's first token is among them."""
        return self.before == self.job.prompt_tokens and bool(self.given.steps)


def gain(job: Job, given: Taken) -> Gain:
    """Adds the tokens of some steps to the text; the last one may end it."""
    gained = Gain(job, given, len(job.tokens))
    for ids in given.steps:
        job.tokens += ids
        job.gained = True
        if job.matcher is not None:
            job.matcher.take(ids)
    if given.done and given.steps:
        job.reason = "stop" if given.steps[-1][-1] in job.request.stop_ids else "length"
    return gained


def events_of(gained: Gain, max_accept: int, version: int) -> list[Event]:
    """An event for each step, of this version of the weights."""
    (job, given, length), events = gained, list[Event]()
    request, cached, queued, limit = job.request, job.cached or 0, job.queued, job.limit
    scored = request.logprobs or request.prompt_logprobs is not None
    for i, ids in enumerate(given.steps):
        drafted = accepted = 0
        if length > job.prompt_tokens and request.speculate:
            drafted, accepted = min(max_accept, limit - length), len(ids) - 1
        length += len(ids)
        last = given.done and i == len(given.steps) - 1
        reason = "stop" if last and ids[-1] in request.stop_ids else "length" if last else None
        event = Event(tuple(ids), drafted, accepted, cached, reason, version=version, queued=queued)
        events.append(_scored(job, event, given, i, length) if scored else event)
    return events


def _scored(job: Job, event: Event, given: Taken, step: int, length: int) -> Event:
    """The event of a step, after which the text has `length` tokens, with the numbers that the
    request asks for."""
    request, new = job.request, {}
    if request.logprobs:
        assert given.logprobs is not None, "read with the report"
        new["logprobs"] = tuple(given.logprobs[step])
    if request.top_logprobs:
        assert given.tops is not None, "read with the report"
        new["top_logprobs"] = tuple(top[: request.top_logprobs] for top in given.tops[step])
    first = length == len(request.prompt_ids) + 1
    if first and request.prompt_logprobs is not None:
        new["prompt_logprobs"] = tuple(job.prompt_logprobs)
        if request.prompt_logprobs:
            tops = (top[: request.prompt_logprobs] for top in job.prompt_tops)
            new["prompt_top_logprobs"] = tuple(tops)
    return event._replace(**new) if new else event
