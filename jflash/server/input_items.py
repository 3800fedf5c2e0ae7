"""The input items of /v1/responses as messages, in the turns that chat completions have.

An answer's thoughts, text and calls are items of their own there, and one message here: a template
would write a new turn of the assistant for each of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from jflash.server.conversation import arguments_of, text_of
from jflash.server.errors import invalid, unsupported
from jflash.server.protocol import FunctionCall, Message, Part, Responses, ToolCall, named


class Turns(NamedTuple):
    """Messages, and the place in the request of the item with which each begins."""

    messages: list[Message]
    places: list[str]


def turns(asked: Responses, one_call: bool) -> Turns:
    """The conversation that a request brings; ApiError for what cannot be read.

    With `one_call` a message has no more than one call, and no text beside it, which is what the
    template of harmony's format reads.
    """
    found = Turns([], [])
    if asked.instructions:
        _add(found, Message(role="system", content=asked.instructions), "instructions")
    if isinstance(asked.input, str):
        _add(found, Message(role="user", content=asked.input), "input")
        return found
    if not asked.input:
        raise invalid("input", "the list is empty")
    thoughts = ""  # that belong to the next item
    for i, item in enumerate(asked.input):
        read = _read(item, where := f"input[{i}]")
        if isinstance(read, str):
            thoughts = read
            continue
        before = found.messages[-1] if found.messages else None
        goes_on = read.tool_calls and not (thoughts or one_call)
        if goes_on and before is not None and before.role == "assistant":
            before.tool_calls = [*(before.tool_calls or []), *(read.tool_calls or [])]
            continue
        if thoughts and read.role == "assistant":
            read.reasoning_content = thoughts
        thoughts = ""
        _add(found, read, where)
    return found


def _add(found: Turns, message: Message, where: str) -> None:
    found.messages.append(message)
    found.places.append(where)


def _read(item: dict[str, Any], where: str) -> Message | str:
    """An item as a message, or as the thoughts before one."""
    kind = item.get("type")
    if kind in (None, "message"):  # the SDK's records write null for what was not given
        return _as(Message, item, where)
    if kind == "function_call":
        call = _as(FunctionCall, item, where)
        call.arguments = arguments_of(call.arguments, f"{where}.arguments")
        return Message(
            role="assistant", tool_calls=[ToolCall(call, id=str(item.get("call_id", "")))]
        )
    if kind == "function_call_output":
        if "output" not in item:
            raise invalid(f"{where}.output", "is missing")
        text = _output(item["output"], f"{where}.output")
        return Message(role="tool", content=text, tool_call_id=str(item.get("call_id", "")))
    if kind == "reasoning":
        parts = _as(list[Part], item.get("content") or [], f"{where}.content")
        return "".join(part.text or "" for part in parts)
    raise unsupported(f"{where}.type", f"{kind!r} cannot be read")


def _as[T](kind: type[T], value: Any, where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise named(str(error), msgspec.json.encode(value), where) from None


def _output(output: Any, where: str) -> str:
    """What a call gave: a text, parts of one, or any JSON."""
    if isinstance(output, str):
        return output
    if isinstance(output, Sequence) and all(_is_part(each) for each in output):
        return text_of(_as(list[Part], output, where), where)
    return msgspec.json.encode(output).decode()


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("type", "")).startswith("input_")
