"""Text as it arrives: whole characters only, nothing of a stop text, each step's part apart."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jflash.generate import Chunk
from jflash.io.text import before_stop

INCOMPLETE = "\ufffd"  # what a decoder gives for the first bytes of a character
COLOURS = ("\033[36m", "\033[33m")
RESET = "\033[0m"


def texts(
    chunks: Iterable[Chunk], decode: Callable[[list[int]], str], stops: Sequence[str] = ()
) -> Iterator[str]:
    """What each chunk adds to the text, empty if only half a character or what may become a stop.

    Joined it is the decoded whole, cut before the first stop. Only the last few tokens are decoded
    again: those since the last place where the text ended with a whole character.
    """
    ids: list[int] = []
    text, shown = "", 0
    begin = end = 0  # ids[begin:end] give the tail of `text`, ids[end:] nothing yet
    for chunk in chunks:
        ids += chunk.token_ids
        last = chunk.generation is not None
        known, longer = decode(ids[begin:end]), decode(ids[begin:])
        if len(ids) > end and (last or not longer.endswith(INCOMPLETE)):
            text += longer[len(known) :]
            begin, end = end, len(ids)
        whole = before_stop(text, stops)
        safe = len(whole) - (0 if last else held_back(whole, stops))
        yield text[shown:safe]
        shown = max(shown, safe)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters could be the beginning of a stop text."""
    starts = (stop[:n] for stop in stops for n in range(1, len(stop)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


def paint(piece: str, step: int, colour: bool) -> str:
    """A step's text in one of two colours, or in brackets; step 0 is the prefill, which is none."""
    if step == 0:
        return piece
    if not colour:
        return f"[{piece}]"
    return f"{COLOURS[step % 2]}{piece}{RESET}" if piece else ""
