"""/v1/completions: prompts as texts or token ids, continued as they stand."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jflash.server.answers import Step, Usage, one_by_one, steps
from jflash.server.errors import invalid, json_response, unsupported
from jflash.server.forms import form_of
from jflash.server.protocol import Completion, StreamOptions, read
from jflash.server.requests import check_count, requests_of, stops_of
from jflash.server.scores import CompletionLogprobs, joined, prompt_logprobs, scoring, whole_prompt
from jflash.server.service import Service
from jflash.server.wire import Events, body_of, while_there
from jflash.serving.handle import Handle

MAX_TOKENS = 16  # of requests without max_tokens, as in OpenAI's API


async def completions(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    asked = read(await body_of(request, service.max_body), Completion)
    service.check_model(asked.model)
    stops, n = stops_of(asked.stop), asked.n or 1
    if asked.best_of not in (None, n):  # all that are made are given
        raise unsupported("best_of", f"{asked.best_of} is not n, {n}: choose among n answers")
    prompts = await _prompts(service, asked, n)
    for ids in prompts:
        service.check_ids(ids, "prompt")
    max_tokens = MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    scores_only = asked.echo is True and max_tokens == 0
    form = form_of(asked, asked.response_format, "response_format")
    wanted = asked
    if (likely := _likely_of_echo(asked)) is not None:
        most, given = max(likely, asked.prompt_logprobs or 0), asked.prompt_logprobs is not None
        # A stream has the numbers of its echo, and is refused those in vLLM's form.
        stream = asked.stream and given
        wanted = msgspec.structs.replace(asked, prompt_logprobs=most, stream=stream)
    requests = requests_of(
        service, wanted, prompts, max_tokens=1 if scores_only else max_tokens,
        stops=stops, stop_token_ids=asked.stop_token_ids or (), n=n,
        grammar=await service.grammar(form, thinks=False), top_logprobs=asked.logprobs,
    )  # fmt: skip
    if scores_only:
        requests = [scoring(request) for request in requests]
    unseen = [_added(service, asked, ids) for ids in prompts]
    echoes = [
        service.echo(list(ids[first:])) if asked.echo else ""
        for ids, first in zip(prompts, unseen, strict=True) for _ in range(n)
    ]  # fmt: skip
    handles = await service.submit(requests, "prompt")
    usage = Usage(prompt=sum(map(len, prompts)), each=n)
    request.state.usage = usage
    given = service, asked, prompts, unseen, handles, stops, usage, echoes, scores_only
    if asked.stream:
        values = _chunks(*given)
        return Events(values, lambda: service.release(handles), seconds=2 * service.request_timeout)
    try:
        return await while_there(request, _whole(*given))
    finally:
        service.release(handles)


async def _prompts(service: Service, asked: Completion, n: int) -> list[list[int]]:
    """The prompts' ids: one text, many, one list of ids or many; not too many for `n` answers."""
    given, special = asked.prompt, asked.add_special_tokens is not False
    if isinstance(given, str):
        return [await service.prompt(given, special, "prompt")]
    if not given:
        raise invalid("prompt", "the list is empty")
    texts = [each for each in given if isinstance(each, str)]
    ids = [each for each in given if isinstance(each, int)]
    if not ids:
        check_count(service, len(given), n)
    lists = [each for each in given if isinstance(each, list)]
    if len(texts) == len(given):
        return [await service.prompt(text, special, "prompt") for text in texts]
    if len(ids) == len(given):
        return [ids]
    if len(lists) == len(given):
        return lists
    raise invalid("prompt", "texts, token ids and lists of token ids cannot be mixed")


def _added(service: Service, asked: Completion, ids: Sequence[int]) -> int:
    """How many tokens the tokenizer has put before the prompt's text, which an echo leaves out."""
    text = isinstance(asked.prompt, str) or isinstance(asked.prompt[0], str)
    begin = service.begins_with if text and asked.add_special_tokens is not False else None
    return int(begin is not None and len(ids) > 0 and ids[0] == begin)


def _likely_of_echo(asked: Completion) -> int | None:
    """How many likely tokens an echoed prompt's numbers tell; None if the echo has no numbers."""
    return asked.logprobs if asked.echo else None


def _steps(
    service: Service, handles: Sequence[Handle], stops: Sequence[str]
) -> AsyncGenerator[list[Step]]:
    """Those of texts that go on with their prompts."""
    return steps(service, handles, stops, service.plain_text, lambda request: request.prompt_ids)


def _frame(service: Service) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.version,
    }


def _choice(
    index: int, text: str, finish: str | None, scores: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}


async def _whole(
    service: Service,
    asked: Completion,
    prompts: Sequence[Sequence[int]],
    unseen: Sequence[int],
    handles: Sequence[Handle],
    stops: Sequence[str],
    usage: Usage,
    echoes: Sequence[str],
    scores_only: bool,
) -> Response:
    """The answers at once; with `scores_only` the echoed prompts without the token after them."""
    texts, ends = list(echoes), [""] * len(handles)
    scores = [list[dict[str, Any] | None]() for _ in handles]
    writers = [CompletionLogprobs(service, prompts[i // usage.each]) for i in range(len(handles))]
    of_prompts = list[Any]([None] * len(handles))
    async for step in one_by_one(_steps(service, handles, stops)):
        usage.add(step)
        i, request = step.answer, handles[step.answer].request
        ends[i] = step.finish or ""
        if step.first:
            ids = prompts[i // usage.each]
            event = whole_prompt(request, ids, step.event) if scores_only else step.event
            of_prompts[i] = await service.beside(
                len(ids), partial(prompt_logprobs, service, ids, event, asked.prompt_logprobs)
            )
            if (likely := _likely_of_echo(asked)) is not None:
                write = partial(writers[i].prompt, ids, event, likely, unseen[i // usage.each])
                scores[i].append(await service.beside(len(ids), write))
        if scores_only:
            usage.new, ends[i] = 0, "length"
            continue
        texts[i] += step.text
        scores[i].append(writers[i].step(step.event))
    choices = [
        _choice(i, text, ends[i], joined(scores[i]))
        | ({} if of_prompts[i] is None else {"prompt_logprobs": of_prompts[i]})
        for i, text in enumerate(texts)
    ]
    whole = partial(json_response, _frame(service) | {"choices": choices, "usage": usage.body()})
    scored = any(each is not None for each in (asked.logprobs, asked.prompt_logprobs))
    return await service.beside(scored * usage.prompt, whole)


async def _chunks(
    service: Service,
    asked: Completion,
    prompts: Sequence[Sequence[int]],
    unseen: Sequence[int],
    handles: Sequence[Handle],
    stops: Sequence[str],
    usage: Usage,
    echoes: Sequence[str],
    scores_only: bool,
) -> AsyncGenerator[list[Any]]:
    """The echoed prompts, each as a chunk, then one chunk a step; in lists of those that are there
    without waiting. An echo with numbers comes with the first step, which has them. With
    `scores_only` the step's chunk is the end alone."""
    frame, options = _frame(service), asked.stream_options or StreamOptions()

    def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
        now = {"usage": usage.body()} if options.continuous_usage_stats else {}
        return frame | {"choices": choices} | now

    writers = [CompletionLogprobs(service, prompts[i // usage.each]) for i in range(len(handles))]
    likely = _likely_of_echo(asked)

    async def of(step: Step) -> list[dict[str, Any]]:
        i, echoed = step.answer, list[dict[str, Any]]()
        if step.first and likely is not None:
            ids, first, event = prompts[i // usage.each], unseen[i // usage.each], step.event
            if scores_only:
                event = whole_prompt(handles[i].request, ids, event)
            write = partial(writers[i].prompt, ids, event, likely, first)
            scores = await service.beside(len(ids), write)
            echoed = [chunk([_choice(i, echoes[i], None, scores)])]
        usage.add(step)
        if scores_only:
            usage.new = 0
            return [*echoed, chunk([_choice(i, "", "length")])]
        scores = writers[i].step(step.event)
        return [*echoed, chunk([_choice(i, step.text, step.finish, scores)])]

    silent = enumerate(echoes if likely is None else ())
    if echoed := [chunk([_choice(i, echo, None)]) for i, echo in silent if echo]:
        yield echoed
    async with aclosing(_steps(service, handles, stops)) as found:
        async for several in found:
            yield [each for step in several for each in await of(step)]
    if options.include_usage:
        yield [frame | {"choices": [], "usage": usage.body()}]
