"""Text as it arrives, step by step: whole characters only, and nothing of a stop text."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jflash.generate import Chunk
from jflash.io.incremental import Incremental

COLOURS = ("\033[36m", "\033[33m")
RESET = "\033[0m"


def texts(
    chunks: Iterable[Chunk], decode: Callable[[list[int]], str], stops: Sequence[str] = ()
) -> Iterator[str]:
    """The text that each chunk adds; empty for half a character or the possible start of a stop.

    The parts join to the decoded whole, cut before the first stop.
    """
    text = Incremental(decode, stops)
    for chunk in chunks:
        yield text.push(chunk.token_ids, last=chunk.generation is not None)


def paint(piece: str, step: int, colour: bool) -> str:
    """A step's text in one of two colours, or in brackets; step 0, the prefill, is plain."""
    if step == 0:
        return piece
    if not colour:
        return f"[{piece}]"
    return f"{COLOURS[step % 2]}{piece}{RESET}" if piece else ""
