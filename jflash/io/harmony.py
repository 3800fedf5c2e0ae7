"""gpt-oss's harmony format: an answer is messages in channels of thoughts, text and calls.

A message is `<|channel|>NAME to=RECIPIENT <|constrain|>TYPE<|message|>TEXT`, ended by `<|end|>`,
`<|call|>` or `<|return|>` and followed by `<|start|>assistant`. The channel `analysis` holds
thoughts; a message to `functions.NAME` is a call; all others are text. The prompt has already begun
the first message.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jflash.io.incremental import held_back
from jflash.io.text import decode

CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
# The last one is no part of the format, but one of gpt-oss's stop ids.
ENDS = (END, "<|call|>", "<|return|>", "<|start|>", "<|endoftext|>")
AN_END = re.compile("|".join(map(re.escape, ENDS)))
ANALYSIS, FINAL = "analysis", "final"
TO = "to=functions."


class Head(NamedTuple):
    """What stands before a message's text."""

    channel: str
    function: str  # that is called; empty for other messages

    @property
    def is_thought(self) -> bool:
        return self.channel == ANALYSIS and not self.function

    @property
    def is_text(self) -> bool:
        return self.channel != ANALYSIS and not self.function


class Part(NamedTuple):
    """The next text of a message, and whether a mark ends the message after it."""

    head: Head
    text: str
    ended: bool


class Messages:
    """Reads one answer as its text comes, marks included; no part has anything of heads and marks.

    A message whose head has ended gives a part at each push, which may have no text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._head: Head | None = None  # of the message under way

    def push(self, text: str, last: bool) -> list[Part]:
        """The parts that a piece of text adds; `last` releases what was held back as the possible
        beginning of a mark."""
        self._held += text
        parts = list[Part]()
        while True:
            if self._head is None:
                before, mark, rest = self._held.partition(MESSAGE)
                if not mark:  # an answer cut within a head has no more text
                    return parts
                self._head, self._held = read_head(AN_END.split(before)[-1]), rest
            end = AN_END.search(self._held)
            if end is None:
                safe = len(self._held) - (0 if last else held_back(self._held, ENDS))
                parts.append(Part(self._head, self._held[:safe], ended=False))
                self._held = self._held[safe:]
                return parts
            parts.append(Part(self._head, self._held[: end.start()], ended=True))
            self._head, self._held = None, self._held[end.end() :]


def read_head(text: str) -> Head:
    """The recipient may stand before the channel or after it."""
    _, _, after = text.partition(CHANNEL)
    words = after.replace("<|", " <|").split()
    to = [word.removeprefix(TO) for word in text.replace("<|", " <|").split() if TO in word]
    return Head(words[0] if words else FINAL, to[0] if to else "")


def has_channels(tokenizer: Any) -> bool:
    """Whether the answers to prompts of the tokenizer's chat template have channels."""
    return CHANNEL in str(getattr(tokenizer, "chat_template", None))


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """A chat's whole answer without special tokens, and without thoughts and calls in channels."""
    if not has_channels(tokenizer):
        return decode(tokenizer, token_ids)
    parts = Messages().push(decode(tokenizer, token_ids, marks=True), last=True)
    return "".join(part.text for part in parts if part.head.is_text)
