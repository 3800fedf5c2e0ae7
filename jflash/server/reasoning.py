"""Splits an answer into thoughts and text, before and after `</think>`, as it streams."""

from typing import NamedTuple

from jflash.io.incremental import held_back

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """The two parts of a piece of text."""

    reasoning: str
    content: str


class Reasoning:
    """Splits one answer. `inside`: the prompt has already opened the thoughts.

    Otherwise an answer that begins with `<think>` opens them. The marks and the line breaks around
    them belong to neither part.
    """

    def __init__(self, inside: bool) -> None:
        self._place = "inside" if inside else "before"
        self._held = ""
        self._fresh = True  # no text of this part yet: leading line breaks are dropped

    def push(self, piece: str, last: bool) -> Split:
        self._held += piece
        reasoning, content = "", ""
        if self._place == "before":
            begin = self._held.lstrip()
            if not last and OPEN.startswith(begin):
                return Split("", "")  # empty, or the mark may still come
            if begin.startswith(OPEN):
                self._held, self._place = begin.removeprefix(OPEN), "inside"
            else:
                self._place, self._fresh = "after", False
        if self._place == "inside":
            thought, mark, rest = self._held.partition(CLOSE)
            if mark:
                reasoning = self._take(thought).rstrip("\n")
                self._held, self._place, self._fresh = rest, "after", True
            else:
                # Line breaks wait too: before the mark they are no part of the thought.
                end = len(thought) - (0 if last else held_back(thought, [CLOSE]))
                end = end if last else len(thought[:end].rstrip("\n"))
                reasoning, self._held = self._take(thought[:end]), thought[end:]
                return Split(reasoning.rstrip("\n") if last else reasoning, "")
        content, self._held = self._take(self._held), ""
        return Split(reasoning, content)

    def _take(self, text: str) -> str:
        text = text.lstrip("\n") if self._fresh else text
        self._fresh = self._fresh and not text
        return text


def opened(prompt: str) -> bool:
    """Whether a prompt ends inside thoughts, because its template opens them."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)
