"""The ids of a prompt, unless it cannot fit: then not more of it is tokenised than shows that.

A tokenizer takes some seconds for each million of characters. This file knows no engine.
"""

from collections.abc import Callable

Encode = Callable[[str], list[int]]
USUAL = 8  # characters of a token: texts have 2 to 5, and white space more
PIECE = 2**16  # characters
# A cut may split a word, which becomes some more tokens: what has twice as many as may be has none
# too many by cuts alone.
SURE = 2


class Beyond(ValueError):
    """A text that has no room, whatever it is followed by."""


def fitting_ids(encode: Encode, longest: int, text: str, most: int) -> list[int]:
    """A text's ids; Beyond for one that `most` tokens of at most `longest` characters cannot be."""
    if len(text) > most * longest:
        raise _beyond(text, most)
    if len(text) > most * USUAL:
        count = 0
        for begin in range(0, len(text), PIECE):
            count += len(encode(text[begin : begin + PIECE]))
            if count > most * SURE:
                raise _beyond(text, most)
    return encode(text)


def _beyond(text: str, most: int) -> Beyond:
    return Beyond(f"{len(text)} characters pass the context of {most} tokens: give fewer")
