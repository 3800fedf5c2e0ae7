"""What a server needs beside an engine, and what its tokenizer and template say alone."""

import functools
from dataclasses import dataclass
from typing import Any

from jflash.io.harmony import CHANNEL
from jflash.io.text import decode, token_ids
from jflash.records.decoding import Sampling
from jflash.server.reasoning import CLOSE, OPEN


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server needs beside an engine. `sampling` has the defaults of a request."""

    tokenizer: Any
    name: str
    version: str
    template: str  # the chat template's source, empty if there is none
    stop_ids: tuple[int, ...]
    sampling: Sampling
    reasoning: bool  # the template's thinking mode
    created: int
    max_accept: int  # drafts that a step may keep
    max_body: int  # bytes
    slots: int  # requests that run at once
    max_queue: int  # requests that may wait
    request_timeout: float  # seconds, from the submission to the last token

    @functools.cached_property
    def harmony(self) -> bool:
        """Whether answers have gpt-oss's channels."""
        return CHANNEL in self.template

    def marks(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return token_ids(self.tokenizer, text, add_special_tokens=False)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest entry, which has a sign for each byte or more."""
        return max(map(len, self.tokenizer.get_vocab()))

    @functools.cached_property
    def begins_with(self) -> int | None:
        """The token that the tokenizer puts before a text; None if it puts none, though it may know
        one that begins messages, as SmolLM2's does."""
        begin = self.tokenizer.bos_token_id
        added = token_ids(self.tokenizer, "", add_special_tokens=True)
        return begin if added[:1] == [begin] else None

    def plain_text(self, ids: list[int]) -> str:
        """Tokens as text, without special tokens."""
        return decode(self.tokenizer, ids)

    def echo(self, ids: list[int]) -> str:
        """A prompt's tokens as its text, with the special tokens that it has."""
        return decode(self.tokenizer, ids, marks=True)

    def answer_text(self, ids: list[int]) -> str:
        """Tokens of a chat's answer as text, with the marks of its channels if it has any."""
        return decode(self.tokenizer, ids, marks=self.harmony)

    @functools.cached_property
    def thought_marks(self) -> tuple[int | None, int | None]:
        """The tokens that open and close thoughts; None for a mark of several tokens."""
        ids = [self.marks(mark) for mark in (OPEN, CLOSE)]
        opens, closes = (found[0] if len(found) == 1 else None for found in ids)
        return opens, closes
