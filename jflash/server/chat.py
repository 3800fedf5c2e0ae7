"""/v1/chat/completions: messages in, and an answer with its thoughts, text and tool calls."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jflash.server.answers import Step, Usage, one_by_one, steps
from jflash.server.conversation import (
    Reader,
    begins_inside,
    call_body,
    call_delta,
    callable_tools,
    prompt_text,
    reader,
    thought_counter,
)
from jflash.server.errors import invalid, json_response
from jflash.server.forms import answer_form
from jflash.server.harmony import AnalysisTokens, Channels
from jflash.server.protocol import Chat, StreamOptions, read
from jflash.server.reasoning import ThoughtTokens
from jflash.server.requests import requests_of, stops_of
from jflash.server.scores import chat_logprobs, joined, prompt_logprobs
from jflash.server.service import Service
from jflash.server.thinking import thinking, thinks
from jflash.server.tools import narrowed, wanted
from jflash.server.wire import Events, body_of, while_there
from jflash.serving.handle import Handle


class Talk(NamedTuple):
    """The answers to one request, under way."""

    service: Service
    handles: Sequence[Handle]
    readers: Sequence[Reader | Channels]
    thoughts: Sequence[ThoughtTokens | AnalysisTokens]
    stops: Sequence[str]
    usage: Usage


async def chat(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    asked = read(await body_of(request, service.max_body), Chat)
    service.check_model(asked.model)
    stops, n = stops_of(asked.stop), asked.n or 1
    tools = wanted(asked.tools, asked.tool_choice, service.template)
    tools, choice = narrowed(tools, asked.tool_choice)
    names = thinking(service, asked.reasoning_effort, asked.chat_template_kwargs or {})
    write = partial(prompt_text, service, asked.messages, tools, names)
    prompt = await service.beside(len(asked.messages), write)
    ids = await service.prompt(prompt, False, "messages")
    one_call = asked.parallel_tool_calls is False
    may, must = callable_tools(service, tools, choice)
    form = answer_form(
        asked, asked.response_format, "response_format", may, must, service.call_marks, one_call
    )
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("top_logprobs", "needs logprobs")
    newer = asked.max_completion_tokens is not None
    requests = requests_of(
        service, asked, [ids],
        max_tokens=asked.max_completion_tokens if newer else asked.max_tokens,
        limit_name="max_completion_tokens" if newer else "max_tokens",
        stops=stops, stop_token_ids=asked.stop_token_ids or (), n=n,
        grammar=await service.grammar(form, thinks(service, prompt, names)),
        top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
    )  # fmt: skip
    inside = begins_inside(service, prompt, names, form)
    readers = [reader(service, inside, bool(tools), one_call) for _ in range(n)]
    usage = Usage(prompt=len(ids), each=n)
    thoughts = [thought_counter(service, inside) for _ in range(n)]
    handles = await service.submit(requests, "messages")
    talk = Talk(service, handles, readers, thoughts, stops, usage)
    request.state.usage = usage
    if asked.stream:
        return Events(
            _chunks(talk, asked.stream_options), lambda: service.release(talk.handles),
            seconds=2 * service.request_timeout,
        )  # fmt: skip
    try:
        return await while_there(request, _whole(talk))
    finally:
        service.release(talk.handles)


def _frame(service: Service, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.version,
    }


def _reason(reader: Reader | Channels, finish: str) -> str:
    return "tool_calls" if reader.called and finish == "stop" else finish


async def _whole(talk: Talk) -> Response:
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        for _ in talk.handles
    ]
    ends, scores = [""] * len(messages), [list[dict | None]() for _ in messages]
    scored = None
    async for step in one_by_one(_steps(talk)):
        _count(talk, step)
        if step.first:
            request = talk.handles[0].request
            given = talk.service, request.prompt_ids, step.event, request.prompt_logprobs
            scored = await talk.service.beside(
                len(request.prompt_ids), partial(prompt_logprobs, *given)
            )
        scores[step.answer].append(chat_logprobs(talk.service, step.event))
        reader, message = talk.readers[step.answer], messages[step.answer]
        parts = reader.push(step.text, last=step.finish is not None)
        message["content"] += parts.content
        message["reasoning_content"] += parts.reasoning
        for part in parts.calls:
            if part.name is not None:
                message["tool_calls"].append(call_body(part.name))
            message["tool_calls"][-1]["function"]["arguments"] += part.arguments
        if step.finish is not None:
            ends[step.answer] = _reason(reader, step.finish)
    choices = [
        {
            "index": i, "message": _message(m), "logprobs": joined(scores[i]),
            "finish_reason": ends[i],
        }
        for i, m in enumerate(messages)
    ]  # fmt: skip
    frame = _frame(talk.service, "chat.completion")
    more = {} if scored is None else {"prompt_logprobs": scored}
    whole = partial(json_response, frame | {"choices": choices, "usage": talk.usage.body()} | more)
    return await talk.service.beside(talk.usage.prompt if scored else 0, whole)


def _steps(talk: Talk) -> AsyncGenerator[list[Step]]:
    return steps(talk.service, talk.handles, talk.stops, talk.service.answer_text)


def _count(talk: Talk, step: Step) -> None:
    talk.usage.add(step)
    talk.usage.reasoning += talk.thoughts[step.answer].count(step.event.token_ids)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The message without empty parts; calls without text have the content null."""
    kept = {name: value for name, value in message.items() if value}
    text = message["content"]
    if "tool_calls" in kept and not text.strip():
        text = None
    return kept | {"content": text}


async def _chunks(talk: Talk, options: StreamOptions | None) -> AsyncGenerator[list[Any]]:
    """The role, then one chunk a step, empty while its text may still become a mark or a stop; in
    lists of those that are there without waiting. A step in which a call begins has more of them,
    for a client may take a call's name for the end of the one before."""
    frame = _frame(talk.service, "chat.completion.chunk")
    options = options or StreamOptions()

    def chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        now = {"usage": talk.usage.body()} if options.continuous_usage_stats else {}
        return frame | {"choices": [choice]} | now

    def of(step: Step) -> list[dict[str, Any]]:
        _count(talk, step)
        index, reader = step.answer, talk.readers[step.answer]
        parts = reader.push(step.text, last=step.finish is not None)
        said = {"content": parts.content}
        if parts.reasoning:
            said["reasoning_content"] = parts.reasoning
        first, *more = [{"tool_calls": [call_delta(part)]} for part in parts.calls] or [{}]
        chunks = [chunk(index, delta) for delta in (said | first, *more)]
        chunks[0]["choices"][0]["logprobs"] = chat_logprobs(talk.service, step.event)
        finish = step.finish and _reason(reader, step.finish)
        chunks[-1]["choices"][0]["finish_reason"] = finish
        return chunks

    role = {"role": "assistant", "content": ""}
    yield [chunk(index, role) for index in range(len(talk.handles))]
    async with aclosing(_steps(talk)) as found:
        async for several in found:
            yield [each for step in several for each in of(step)]
    if options.include_usage:
        yield [frame | {"choices": [], "usage": talk.usage.body()}]
