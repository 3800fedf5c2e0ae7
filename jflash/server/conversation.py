"""Messages through the model's chat template, and the parts of an answer: thoughts, text, calls."""

import contextlib
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from jflash.io.harmony import ANALYSIS, CHANNEL, END
from jflash.io.text import through_template
from jflash.server.calls import CallPart
from jflash.server.errors import ApiError, invalid, unsupported
from jflash.server.forms import Form
from jflash.server.harmony import AnalysisTokens, Channels
from jflash.server.protocol import Message, Part
from jflash.server.reasoning import Reasoning, ThoughtTokens, opened
from jflash.server.service import Service
from jflash.server.thinking import thinks
from jflash.server.tools import Parts, Tools, forced

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES |= {"tool": "tool"}


def prompt_text(
    service: Service,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    names: dict[str, Any],
    param: str = "messages",
    places: Sequence[str] | None = None,
) -> str:
    """The prompt up to the beginning of the answer; the template reads `names`.

    Where the template takes only one, the messages of the system at the beginning are one.
    ApiError for a message that cannot be read, by its place in the request: that in the list
    `param` unless `places` are given.
    """
    if not service.template:
        raise ApiError(
            "the model has no chat template: use /v1/completions", param=param, code="no_template"
        )
    places = [f"{param}[{i}]" for i in range(len(messages))] if places is None else places
    turns = [_turn(*each) for each in zip(messages, places, strict=True)]
    if service.harmony:  # gpt-oss's template leaves out those after the first
        turns = _with_one_system(turns)
    given = names | ({"tools": tools} if tools else {})
    try:
        return through_template(service.tokenizer, turns, **given)
    except ValueError as error:
        refused = invalid(param, str(error))
    # Qwen3.5's template, for one, refuses several, which agents send.
    if len(joined := _with_one_system(turns)) < len(turns):
        with contextlib.suppress(ValueError):
            return through_template(service.tokenizer, joined, **given)
    raise refused


def _with_one_system(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, those of the system with which they begin as one."""
    first = list(itertools.takewhile(lambda turn: turn["role"] == "system", turns))
    if len(first) < 2:
        return turns
    return [first[0] | {"content": "\n\n".join(x["content"] for x in first)}, *turns[len(first) :]]


def _turn(message: Message, where: str) -> dict[str, Any]:
    """A message as templates read it."""
    if message.role not in ROLES:
        raise invalid(f"{where}.role", f"{message.role!r} is none of {', '.join(ROLES)}")
    if message.function_call is not None:
        raise unsupported(f"{where}.function_call", "give tool_calls")
    calls = message.tool_calls or []
    content = message.refusal if message.content is None else message.content
    if content is None and not calls:
        raise invalid(f"{where}.content", "is missing")
    text = text_of(content, f"{where}.content")
    turn: dict[str, Any] = {"role": ROLES[message.role], "content": text}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, name) is not None:
            turn[name] = getattr(message, name)
    if calls and not turn["content"] and message.reasoning_content:
        turn["thinking"] = message.reasoning_content  # its name in gpt-oss's template
    if calls:
        turn["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(
                        call.function.arguments, f"{where}.tool_calls[{i}].function.arguments"
                    ),
                },
            }
            for i, call in enumerate(calls)
        ]
    return turn


def text_of(content: str | Sequence[Part] | None, where: str) -> str:
    """A text, or its parts joined; ApiError, by the place, for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise unsupported(f"{where}[{index}].type", f"{part.type!r} cannot be read")
        name = "refusal" if part.type == "refusal" else "text"
        if (text := getattr(part, name)) is None:
            raise invalid(f"{where}[{index}].{name}", "is missing")
        texts.append(text)
    return "".join(texts)


def arguments_of(given: str | dict[str, Any], where: str) -> dict[str, Any]:
    """A call's arguments, which may come as text; ApiError, by the place, for no object."""
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise invalid(where, "is no JSON object") from None


class Reader:
    """Splits one answer into its parts as it streams. `inside`: it begins within thoughts."""

    def __init__(self, inside: bool, tools: bool, one_call: bool) -> None:
        self._reasoning = Reasoning(inside)
        self._tools = Tools(1 if one_call else None) if tools else None

    def push(self, text: str, last: bool) -> Parts:
        split = self._reasoning.push(text, last)
        if self._tools is None:
            return Parts(split.reasoning, split.content, [])
        content, calls = self._tools.push(split.content, last)
        return Parts(split.reasoning, content, calls)

    @property
    def called(self) -> bool:
        return self._tools is not None and self._tools.count > 0


def callable_tools(
    service: Service, tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tools that may be called in place of a text, and those of which one must be; ApiError
    where no grammar can see to it. Calls of harmony's format come before its texts."""
    must = forced(tools, choice)
    if must and service.harmony:
        raise unsupported("tool_choice", "calls of gpt-oss's form cannot be forced: give auto")
    return [] if service.harmony else tools or [], must


def begins_inside(service: Service, prompt: str, names: dict[str, Any], form: Form | None) -> bool:
    """Whether an answer begins within thoughts: the prompt has opened them, or the answer's form
    waits for their end, whether or not the model opens them."""
    return opened(prompt) or (form is not None and thinks(service, prompt, names))


def reader(service: Service, inside: bool, tools: bool, one_call: bool) -> Reader | Channels:
    """What splits an answer."""
    if service.harmony:
        return Channels(1 if one_call else None)
    return Reader(inside, tools, one_call)


def thought_counter(service: Service, inside: bool) -> ThoughtTokens | AnalysisTokens:
    """What counts the tokens of an answer's thoughts."""
    if service.harmony:
        marks = (service.marks(text)[0] for text in (CHANNEL, ANALYSIS, END))
        return AnalysisTokens(*marks)
    return ThoughtTokens(inside, service.thought_marks)


def call_body(name: str) -> dict[str, Any]:
    """OpenAI's form of a call that begins, with a new id."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def call_delta(part: CallPart) -> dict[str, Any]:
    """OpenAI's form of what a chunk adds to a call."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index} | call_body(part.name)
