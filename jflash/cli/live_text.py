"""Text as it arrives: whole characters only, nothing of a stop text, each step's part apart."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jflash.generate import Chunk
from jflash.io.incremental import Incremental

COLOURS = ("\033[36m", "\033[33m")
RESET = "\033[0m"


def texts(
    chunks: Iterable[Chunk], decode: Callable[[list[int]], str], stops: Sequence[str] = ()
) -> Iterator[str]:
    """What each chunk adds to the text, empty if only half a character or what may become a stop.

    Joined it is the decoded whole, cut before the first stop.
    """
    text = Incremental(decode, stops)
    for chunk in chunks:
        yield text.push(chunk.token_ids, last=chunk.generation is not None)


def paint(piece: str, step: int, colour: bool) -> str:
    """A step's text in one of two colours, or in brackets; step 0 is the prefill, which is none."""
    if step == 0:
        return piece
    if not colour:
        return f"[{piece}]"
    return f"{COLOURS[step % 2]}{piece}{RESET}" if piece else ""
