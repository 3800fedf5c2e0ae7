"""gpt-oss's harmony format: an answer is messages in channels of thoughts, text and calls.

A message is `<|channel|>NAME to=RECIPIENT <|constrain|>TYPE<|message|>TEXT`, ended by `<|end|>`,
`<|call|>` or `<|return|>` and followed by `<|start|>assistant`. The channel `analysis` holds
thoughts; a message to `functions.NAME` is a call; all others are text. The prompt has already begun
the first message.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jflash.io.text import decode

CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>", "<|start|>")
ANALYSIS, FINAL = "analysis", "final"
TO = "to=functions."


class Head(NamedTuple):
    """What stands before a message's text."""

    channel: str
    function: str  # that is called; empty for other messages

    @property
    def is_text(self) -> bool:
        return self.channel != ANALYSIS and not self.function


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
    text = ""
    ends = "|".join(map(re.escape, ENDS))
    for message in re.split(ends, decode(tokenizer, token_ids, marks=True)):
        head, mark, body = message.partition(MESSAGE)
        text += body if mark and read_head(head).is_text else ""
    return text
