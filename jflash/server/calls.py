"""Calls in an answer, part by part: a name first, then the arguments as the model writes them.

A call cannot be taken back once its name is out. So one begins only where its arguments are an
object that has begun, and those that the model spoils or that the limit cuts stay as they are: who
gets them checks them, as with OpenAI's service.
"""

import re
from typing import NamedTuple

OBJECT = r'(?=\{\s*["}])'  # a JSON object's beginning is next
BEGINS = re.compile(r"\s*" + OBJECT)


class CallPart(NamedTuple):
    """What a piece of text adds to a call. The first part has its name, and no arguments."""

    index: int  # of the call in the answer
    name: str | None
    arguments: str  # JSON
    ended: bool  # the arguments are whole


class Calls:
    """The calls of one answer; those after the first `most` are dropped."""

    def __init__(self, most: int | None = None) -> None:
        self._most, self._arguments = most, _Object()
        self.count = 0  # of those that have begun

    def begin(self, name: str) -> list[CallPart]:
        """The first part of the next call."""
        self.count += 1
        self._arguments = _Object()
        return self._kept(name, "")

    def add(self, text: str) -> list[CallPart]:
        """The part of a text that belongs to the arguments; nothing of what follows them."""
        new = self._arguments.take(text)
        return self._kept(None, new) if new else []

    def whole(self, name: str, arguments: str) -> list[CallPart]:
        return [*self.begin(name), *self.add(arguments)]

    def _kept(self, name: str | None, arguments: str) -> list[CallPart]:
        if self._most is not None and self.count > self._most:
            return []
        return [CallPart(self.count - 1, name, arguments, self._arguments.ended)]


class Strings:
    """Tells the strings of JSON from the rest, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._quoted = self._escaped = False

    def inside(self, letter: str) -> bool:
        """Whether the text's next letter belongs to a string, as its quotation marks do."""
        quoted = self._quoted
        if self._escaped:
            self._escaped = False
        elif quoted:
            self._escaped, self._quoted = letter == "\\", letter != '"'
        else:
            self._quoted = letter == '"'
        return quoted or self._quoted

    def until(self, mark: str, text: str, last: bool) -> tuple[int, bool]:
        """How many letters stand before the mark, and whether it is there; before what may become
        the mark unless this text is the `last`. The rest is to be given again."""
        for i, letter in enumerate(text):
            if letter == mark[0] and not self._quoted:
                if text.startswith(mark, i):
                    return i, True
                if not last and mark.startswith(text[i:]):
                    return i, False
            self.inside(letter)
        return len(text), False


class _Object:
    """Finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._strings = 0, Strings()
        self.ended = False

    def take(self, text: str) -> str:
        """The part of the text up to the object's end."""
        if self.ended:
            return ""
        for i, letter in enumerate(text):
            if self._strings.inside(letter):
                continue
            if letter in "{[":
                self._depth += 1
            elif letter in "]}":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return text[: i + 1]
        return text
