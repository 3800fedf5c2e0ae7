"""Tool calls in an answer as it streams, in the form of Hermes and Qwen, and the choice of tools.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Its arguments are given as they
come if the name stands before them, and else once it is whole. Text between the marks that is no
call stays text, and white space between two calls, before the first or after the last is none.
Within a string of JSON a mark is a part of the string.
"""

import re
from typing import Any, NamedTuple

import msgspec

from jflash.io.incremental import held_back
from jflash.server.calls import OBJECT, CallPart, Calls, Strings
from jflash.server.errors import invalid, unsupported

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*' + OBJECT)


class Parts(NamedTuple):
    """The additions of a piece of text to the parts of its answer."""

    reasoning: str
    content: str
    calls: list[CallPart]


class Tools:
    """Reads the calls out of one answer; those after the first `most` are dropped."""

    def __init__(self, most: int | None = None) -> None:
        self._held, self._calls = "", Calls(most)
        self._inside = self._begun = False  # of a call; its arguments have begun
        self._strings, self._read = Strings(), 0  # of its text, of which so much was read
        self._blank: str | None = ""  # since the beginning or a call; None once there is text

    @property
    def count(self) -> int:
        return self._calls.count

    def push(self, piece: str, last: bool) -> tuple[str, list[CallPart]]:
        """The text and the parts of calls that a piece adds."""
        self._held += piece
        text, parts = "", list[CallPart]()
        while True:
            if not self._inside:
                before, opened, inside = self._held.partition(OPEN)
                if not opened:
                    end = len(before) - (0 if last else held_back(before, [OPEN]))
                    self._held = before[end:]
                    return text + self._said(before[:end], last), parts
                text, self._held, self._inside = text + self._said(before), inside, True
                self._strings, self._read = Strings(), 0
            if not self._begun and (head := _head(self._held)) is not None:
                name, end = head
                parts += self._calls.begin(name)
                self._blank = ""
                self._begun, self._held, self._strings = True, self._held[end:], Strings()
            if self._begun:
                end, closed = self._strings.until(CLOSE, self._held, last)
                parts += self._calls.add(self._held[:end])
                self._begun, self._held = not closed, self._held[end + len(CLOSE) * closed :]
                self._inside = self._begun
                if self._begun:
                    return text, parts
                continue
            body, closed, rest = self._closed(last)
            if not closed and not last:
                return text, parts
            call = _call(body)
            if call is None:
                text += self._said(OPEN + body + closed)
            else:
                parts += self._calls.whole(call.name, bytes(call.arguments).decode())
                self._blank = ""
            self._held, self._inside = rest, False

    def _said(self, text: str, last: bool = False) -> str:
        """What can be given of the text outside of calls: white space waits for other text."""
        if self._blank is None:
            return text
        text = self._blank + text
        waits = not text.strip() and (self.count > 0 or not last)
        self._blank = text if waits else None
        return "" if waits else text

    def _closed(self, last: bool) -> tuple[str, str, str]:
        """The text before the mark that closes a call, the mark or nothing, and the text after it.
        A text that ends within a string is no JSON, and any mark in it counts."""
        held = self._held
        if held.lstrip().startswith("{"):
            more, closed = self._strings.until(CLOSE, held[self._read :], last)
            self._read += more
            if closed:
                return held[: self._read], CLOSE, held[self._read + len(CLOSE) :]
            if not last:
                return held, "", ""
        return held.partition(CLOSE)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class _Bare(msgspec.Struct, forbid_unknown_fields=True):
    """A call without arguments: what has other fields is none."""

    name: str


def _head(body: str) -> tuple[str, int] | None:
    """The name of a call whose arguments have begun, and their place in its text, which others may
    follow."""
    found = HEAD.match(body)
    if found is None:
        return None
    try:
        return msgspec.json.decode(found[1], type=str), found.end()
    except msgspec.DecodeError:
        return None


def _call(body: str) -> _Call | None:
    """A whole call."""
    try:
        return _Call(msgspec.json.decode(body, type=_Bare).name, msgspec.Raw(b"{}"))
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        call = msgspec.json.decode(body, type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    return call if bytes(call.arguments).startswith(b"{") else None


def wanted(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    template: str,
    inside: str = ".function",
) -> list[dict[str, Any]] | None:
    """The tools for the template; ApiError for what is no tool, and a template without tools.

    `inside` is where in a tool the request has the function's fields.
    """
    for index, tool in enumerate(tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise invalid(f"tools[{index}]", 'must be {"type": "function", "function": {…}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{index}]{inside}.name", "must be a text")
        if not isinstance(function.get("parameters") or {}, dict):
            raise invalid(f"tools[{index}]{inside}.parameters", "must be a JSON schema")
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
