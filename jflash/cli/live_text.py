"""Text as it arrives, step by step: whole characters only, and nothing of a stop text."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jflash.generate import Chunk
from jflash.io.harmony import Messages
from jflash.io.incremental import Incremental
from jflash.io.text import decode
from jflash.server.reasoning import CLOSE, OPEN

COLOURS = ("\033[36m", "\033[33m")
RESET = "\033[0m"


def texts(
    chunks: Iterable[Chunk], decode: Callable[[list[int]], str], stops: Sequence[str] = ()
) -> Iterator[str]:
    """The text that each chunk adds; empty for half a character or the possible start of a stop.

    The parts join to the decoded whole, cut before the first stop.
    """
    return (text for text, _ in _with_last(chunks, decode, stops))


class Piece(NamedTuple):
    """What a chunk adds to the text that is shown, and to the answer that a conversation keeps."""

    shown: str
    answer: str


def channel_pieces(
    chunks: Iterable[Chunk], tokenizer: Any, stops: Sequence[str] = ()
) -> Iterator[Piece]:
    """The pieces of an answer in gpt-oss's channels, shown as other models write theirs: thoughts
    between `<think>` and `</think>`, then the text. The text alone is the answer, as in
    `answer_text`; calls are left out."""
    messages, thinks = Messages(), False
    with_marks = functools.partial(decode, tokenizer, marks=True)
    for text, last in _with_last(chunks, with_marks, stops):
        shown, answer = "", ""
        for part in messages.push(text, last):
            if part.head.is_thought:
                shown += part.text if thinks else f"{OPEN}\n{part.text}"
                thinks = not part.ended
                shown += f"\n{CLOSE}\n\n" if part.ended else ""
            elif part.head.is_text:
                shown, answer = shown + part.text, answer + part.text
        yield Piece(shown, answer)


def _with_last(
    chunks: Iterable[Chunk], decode: Callable[[list[int]], str], stops: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Each chunk's text, and whether it is the last one."""
    text = Incremental(decode, stops)
    for chunk in chunks:
        last = chunk.generation is not None
        yield text.push(chunk.token_ids, last), last


def paint(piece: str, step: int, colour: bool) -> str:
    """A step's text in one of two colours, or in brackets; step 0, the prefill, is plain."""
    if step == 0:
        return piece
    if not colour:
        return f"[{piece}]"
    return f"{COLOURS[step % 2]}{piece}{RESET}" if piece else ""
