"""Splits an answer into thoughts and text, before and after `</think>`, as it streams."""

from collections.abc import Sequence
from typing import NamedTuple

from jflash.io.incremental import held_back

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """The two parts of a piece of text."""

    reasoning: str
    content: str


class Reasoning:
    """Splits one answer. `inside`: it begins within thoughts, and may open them once more.

    Otherwise an answer that begins with `<think>` opens them. The marks and the line breaks around
    them belong to neither part.
    """

    def __init__(self, inside: bool) -> None:
        self._place, self._inside = "before", inside
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
            elif self._inside:
                self._place = "inside"
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


class ThoughtTokens:
    """Counts the tokens of an answer's thoughts, its marks included.

    `marks` open and close them; without a single token for the second nothing is counted.
    """

    def __init__(self, inside: bool, marks: tuple[int | None, int | None]) -> None:
        self._opens, self._closes = marks
        self._inside, self._fresh = inside, True

    def count(self, token_ids: Sequence[int]) -> int:
        """The tokens of thoughts among the answer's next ones."""
        if self._closes is None:
            return 0
        if self._fresh and token_ids:
            self._inside |= token_ids[0] == self._opens
            self._fresh = False
        if not self._inside:
            return 0
        self._inside = self._closes not in token_ids
        return len(token_ids) if self._inside else token_ids.index(self._closes) + 1


def opened(prompt: str) -> bool:
    """Whether a prompt ends inside thoughts, because its template opens them at its end. A mark
    before that is a part of a message, which may ask what it means."""
    return prompt.rstrip().endswith(OPEN)
