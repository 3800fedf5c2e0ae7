"""Text as its tokens arrive: whole characters only, and nothing of a stop text.

This file knows token ids, a decoder and stop texts, and nothing of requests.
"""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what a decoder gives for the first bytes of a character
WINDOW = 32  # tokens; longer ones cost more than the second decoding that starts one anew
LONGEST = 4  # bytes of a character, so it has as many tokens at most
BEFORE = 5  # tokens of a text that goes on which are decoded with the first new ones, as in vLLM


class Incremental:
    """A decoder for one answer.

    The pieces joined are the decoded whole, cut before the stop text that is complete first; of
    several, before the earliest. So the text does not depend on how tokens come together. A call
    decodes once, its tokens after at most WINDOW and a call's of those before: a tokenizer may join
    a word to the text before it. So an answer that goes on with a text, as the completion of a
    prompt does, needs the tokens `before` it: a decoder may drop a blank at its beginning. A stop
    text that is complete within the first `least` tokens does not count, as in vLLM.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        least: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        self._decode, self._stops, self._least = decode, stops, least
        self._early = 0  # characters held back that are of the first `least` tokens
        self._known, self._text = self._beginning(before)  # tokens with text that has been taken
        self._anew = 0  # of these, the first one with which they may begin anew
        self._new: list[int] = []  # tokens after them, whose text may be half a character
        self._held = ""  # text that may be the beginning of a stop
        self.stopped = False
        self.taken = 0  # tokens of the last call, to the one that completed a stop

    def _beginning(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last tokens before, and their text. A decoder of bytes reads none of several
        characters if the first one lacks its beginning: so there may be a few more of them."""
        for more in range(LONGEST if before else 0):
            text = self._decode(known := list(before[-BEFORE - more :]))
            if not text.endswith(INCOMPLETE):
                return known, text
        return [], ""  # no text goes on with half a character

    def push(self, token_ids: Sequence[int], last: bool) -> str:
        """The text that these tokens add; `last` releases everything that was held back."""
        self.taken = 0
        if self.stopped:
            return ""
        if not self._stops:  # nothing is held back
            self._take(list(token_ids), last)
            self.taken, piece, self._held = len(token_ids), self._held, ""
            return piece
        for token in token_ids:
            self._take([token], last=False)
            self.taken += 1
            if self._least > 0:
                self._least -= 1
                self._early = len(self._held)
            elif self._found():
                return self._held
        if last:
            self._take([], last=True)
            if self._found():
                return self._held
        safe = len(self._held) - (0 if last else held_back(self._held, self._stops))
        piece, self._held = self._held[:safe], self._held[safe:]
        self._early = max(0, self._early - safe)
        return piece

    def _take(self, token_ids: list[int], last: bool) -> None:
        """Adds the tokens' text to what is held, up to its last whole character."""
        self._new += token_ids
        if self._new:
            both = self._decode(self._known + self._new)
            if last or not both.endswith(INCOMPLETE):
                self._taken(len(self._new), both)
            elif len(self._new) > LONGEST:
                self._taken_before(range(1, LONGEST))

    def _taken_before(self, cuts: Sequence[int]) -> None:
        """Takes the text of all but the last few tokens, which may be a part of a character; bytes
        that are none of any are not waited for."""
        for cut in cuts:
            text = self._decode(self._known + self._new[:-cut])
            if cut == cuts[-1] or not text.endswith(INCOMPLETE):
                return self._taken(len(self._new) - cut, text)

    def _taken(self, count: int, text: str) -> None:
        """The first of the new tokens, with which the text of the known ones is this."""
        self._held += text[len(self._text) :]
        new, self._new = self._new[:count], self._new[count:]
        if text == self._text and (text or not self._decode(new + new)):
            return  # special tokens, of which no text is made; a first blank has one if it is twice
        begin = len(self._known)
        self._known, self._text = self._known + new, text
        if len(self._known) > WINDOW:
            # A decoder may drop a blank at the beginning: it must have come, or the next one would.
            self._anew = self._anew or begin
            if later := self._decode(self._known[self._anew :]):
                self._known, self._text, self._anew = self._known[self._anew :], later, 0

    def _found(self) -> bool:
        """Looks for a complete stop text, and cuts what is held before it."""
        first = (max(0, self._early - len(stop) + 1) for stop in self._stops)
        starts = [self._held.find(*each) for each in zip(self._stops, first, strict=True)]
        if places := [start for start in starts if start >= 0]:
            self._held, self.stopped = self._held[: min(places)], True
        return self.stopped


def held_back(text: str, stops: Sequence[str]) -> int:
    """The number of last characters that could begin a stop text."""
    most = 0
    for stop in stops:
        for count in range(min(len(stop) - 1, len(text)), most, -1):
            if text.endswith(stop[:count]):
                most = count
                break
    return most
