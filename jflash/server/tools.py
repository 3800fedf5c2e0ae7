"""Tool calls in an answer as it streams, in the form of Hermes and Qwen.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, returned once it is complete. Text
between the marks that is no call stays text.
"""

from typing import Any, NamedTuple

import msgspec

from jflash.io.incremental import held_back
from jflash.server.errors import invalid, unsupported

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    name: str
    arguments: str  # JSON


class Parts(NamedTuple):
    """The additions of a piece of text to the parts of its answer."""

    reasoning: str
    content: str
    calls: list[Call]


class Tools:
    """Reads the calls out of one answer."""

    def __init__(self, most: int | None = None) -> None:
        self._held = ""
        self._most = most  # later calls are dropped
        self.count = 0

    def push(self, piece: str, last: bool) -> tuple[str, list[Call]]:
        """The text and the complete calls that a piece adds."""
        self._held += piece
        text, calls = "", list[Call]()
        while True:
            before, opened, inside = self._held.partition(OPEN)
            if not opened:
                end = len(before) - (0 if last else held_back(before, [OPEN]))
                text, self._held = text + before[:end], before[end:]
                break
            body, closed, rest = inside.partition(CLOSE)
            if not closed and not last:
                text, self._held = text + before, opened + inside
                break
            call = _call(body)
            if call is None:
                text, self._held = text + before + opened + body + closed, rest
                continue
            self.count += 1
            text, self._held = text + before, rest
            if self._most is None or self.count <= self._most:
                calls.append(call)
        return text, calls


def _call(body: str) -> Call | None:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], msgspec.json.encode(arguments).decode())


def wanted(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, template: str
) -> list[dict[str, Any]] | None:
    """The tools for the template; ApiError for what is no tool, and a template without tools."""
    for index, tool in enumerate(tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise invalid(f"tools[{index}]", 'must be {"type": "function", "function": {…}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{index}].function.name", "must be a text")
    if not isinstance(choice, dict) and choice not in (None, "none", "auto", "required"):
        raise invalid("tool_choice", f"{choice!r} is none of none, auto, required or a function")
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "there are no tools to call")
    if not tools or choice == "none":
        return None
    if "tools" not in template:
        raise unsupported("tools", "the model's chat template has no place for them")
    return tools


def narrowed(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The tools and the choice among them. OpenAI's `allowed_tools` is a choice among some of them,
    and the template shows only those. `wanted` has checked the tools."""
    if not tools or not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    given = choice.get("allowed_tools", choice)  # /v1/responses has them one level higher
    mode, some = (
        (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    )
    if mode not in ("auto", "required"):
        raise invalid("tool_choice", f"the mode {mode!r} is none of auto, required")
    names = [_function(one) for one in some] if isinstance(some, list) else []
    unknown = [name for name in names if name not in [tool["function"]["name"] for tool in tools]]
    if unknown or not names:
        raise invalid("tool_choice", f"{[*unknown, None][0]!r} is no function of tools")
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def _function(choice: Any) -> Any:
    """The name of the function that is meant; /v1/responses has it one level higher."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)
    return function.get("name") if isinstance(function, dict) else None


def forced(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The tools of which one must be called; none if the model may choose."""
    if not tools or choice in (None, "none", "auto"):
        return []
    if choice == "required":
        return tools
    assert isinstance(choice, dict), "`wanted` has refused other choices"
    name = _function(choice)
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise invalid("tool_choice", f"{name!r} is no function of tools")
    return named
