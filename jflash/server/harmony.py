"""gpt-oss's answers in its harmony format (see jflash/io/harmony.py), as they stream."""

from collections.abc import Sequence

from jflash.io.harmony import Messages
from jflash.server.calls import BEGINS, CallPart, Calls
from jflash.server.tools import Parts


class Channels:
    """Reads one answer, of which nothing of the heads and marks is text. Calls after the first
    `most` are dropped."""

    def __init__(self, most: int | None = None) -> None:
        self._messages = Messages()
        self._before = ""  # text before a call's arguments
        self._begun, self._calls = False, Calls(most)

    @property
    def called(self) -> bool:
        return self._calls.count > 0

    def push(self, text: str, last: bool) -> Parts:
        """The additions of a piece of text."""
        reasoning, content, calls = "", "", list[CallPart]()
        for head, body, ended in self._messages.push(text, last):
            if head.function:
                calls += self._of_call(head.function, body, ended or last)
            elif head.is_thought:
                reasoning += body
            else:
                content += body
        return Parts(reasoning, content, calls)

    def _of_call(self, name: str, body: str, ended: bool) -> list[CallPart]:
        """The parts of a message that is a call: none unless its text is an object or empty."""
        parts = list[CallPart]()
        if not self._begun:
            self._before += body
            if found := BEGINS.match(self._before):
                parts, self._begun = self._calls.begin(name), True
                body = self._before[found.end() :]
            elif ended and not self._before.strip():
                parts = self._calls.whole(name, "{}")
        if self._begun:
            parts += self._calls.add(body)
        if ended:
            self._begun, self._before = False, ""
        return parts


class AnalysisTokens:
    """Counts the tokens of an answer's thoughts, from the channel's name to the message's end.

    `channel`, `analysis` and `end` are the tokens of the marks and of the name.
    """

    def __init__(self, channel: int, analysis: int, end: int) -> None:
        self._channel, self._analysis, self._end = channel, analysis, end
        self._inside = self._named = False

    def count(self, token_ids: Sequence[int]) -> int:
        """The tokens of thoughts among the answer's next ones."""
        count = 0
        for token in token_ids:
            if self._named:
                self._inside = token == self._analysis
            count += self._inside
            self._named = token == self._channel
            self._inside &= token != self._end
        return count
