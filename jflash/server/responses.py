"""/v1/responses, stateless: each request brings its whole conversation.

Input items become messages, and an answer becomes output items: thoughts, a message, calls.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jflash.server.answers import Step, Usage, steps
from jflash.server.conversation import (
    Reader,
    begins_inside,
    callable_tools,
    prompt_text,
    reader,
    thought_counter,
)
from jflash.server.errors import invalid, json_response, unsupported
from jflash.server.forms import answer_form
from jflash.server.harmony import AnalysisTokens, Channels
from jflash.server.input_items import turns
from jflash.server.protocol import Responses, read
from jflash.server.reasoning import ThoughtTokens
from jflash.server.requests import requests_of
from jflash.server.response_items import Output
from jflash.server.service import Service
from jflash.server.thinking import thinking, thinks
from jflash.server.tools import narrowed, wanted
from jflash.server.wire import Events, body_of, while_there
from jflash.serving.handle import Handle

EFFORT, FORMAT, VERBOSITY = "effort", "format", "verbosity"


async def responses(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    asked = read(await body_of(request, service.max_body), Responses)
    service.check_model(asked.model)
    _check_parts(asked)
    tools = wanted(_chat_tools(asked.tools), asked.tool_choice, service.template, inside="")
    tools, choice = narrowed(tools, asked.tool_choice)
    effort = (asked.reasoning or {}).get(EFFORT)
    names = thinking(service, effort, {}, "reasoning.effort")
    messages, places = turns(asked, one_call=service.harmony)
    write = partial(prompt_text, service, messages, tools, names, "input", places)
    prompt = await service.beside(len(messages), write)
    ids = await service.prompt(prompt, False, "input")
    one_call = asked.parallel_tool_calls is False
    may, must = callable_tools(service, tools, choice)
    form = answer_form(
        asked,
        (asked.text or {}).get(FORMAT),
        "text.format",
        may,
        must,
        service.call_marks,
        one_call,
    )
    requests = requests_of(
        service, asked, [ids], max_tokens=asked.max_output_tokens, limit_name="max_output_tokens",
        grammar=await service.grammar(form, thinks(service, prompt, names)),
    )  # fmt: skip
    inside = begins_inside(service, prompt, names, form)
    parts = reader(service, inside, bool(tools), one_call)
    thoughts = thought_counter(service, inside)
    usage = Usage(prompt=len(ids))
    request.state.usage = usage
    [handle] = await service.submit(requests, "input")
    output = Output(_frame(service, asked), usage)
    events = _events(service, handle, parts, thoughts, usage, output)
    if asked.stream:
        return Events(
            events, lambda: service.release([handle]), seconds=2 * service.request_timeout,
            done=b"", named=True,
        )  # fmt: skip
    try:
        await while_there(request, _drain(events))
    finally:
        service.release([handle])
    return json_response(output.body())


async def _drain(events: AsyncGenerator[list[Any]]) -> None:
    async for _ in events:
        pass


async def _events(
    service: Service,
    handle: Handle,
    reader: Reader | Channels,
    thoughts: ThoughtTokens | AnalysisTokens,
    usage: Usage,
    output: Output,
) -> AsyncGenerator[list[Any]]:
    def of(step: Step) -> list[Any]:
        usage.add(step)
        usage.reasoning += thoughts.count(step.event.token_ids)
        new = list(output.add(reader.push(step.text, last=step.finish is not None)))
        return new if step.finish is None else [*new, *output.end(step.finish)]

    yield list(output.begin())
    async with aclosing(steps(service, [handle], [], service.answer_text)) as found:
        async for several in found:
            yield [event for step in several for event in of(step)]


def _check_parts(asked: Responses) -> None:
    """ApiError for features that only OpenAI's service has."""
    if asked.prompt is not None:
        raise unsupported("prompt", "no templates of prompts are stored")
    effort = (asked.reasoning or {}).get(EFFORT)
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort", f"{effort!r} is no text")
    form = (asked.text or {}).get(FORMAT)
    if form is not None and not isinstance(form, dict):
        raise invalid("text.format", "must be an object")
    if (asked.text or {}).get(VERBOSITY) not in (None, "medium"):
        raise unsupported("text.verbosity", "the model has no such control")
    # OpenAI's 0 asks for nothing; vLLM's asks for the numbers of the prompt's own tokens.
    numbers = {"top_logprobs": asked.top_logprobs or None, "prompt_logprobs": asked.prompt_logprobs}
    for name, most in numbers.items():
        if most is not None:
            raise unsupported(name, "this route gives no logprobs")


def _chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools in the form of chat completions: a function's fields lie one level deeper."""
    functions = []
    for index, tool in enumerate(tools or []):
        if tool.get("type") != "function":
            raise unsupported(f"tools[{index}].type", f"{tool.get('type')!r} is not run here")
        fields = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in fields if name in tool}
        functions.append({"type": "function", "function": function})
    return functions or None


def _frame(service: Service, asked: Responses) -> dict[str, Any]:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": service.name,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "store": False,
        "previous_response_id": None,
        "metadata": asked.metadata or {},
        "error": None,
    }
