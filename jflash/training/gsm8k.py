"""GSM8K's files, and its questions with other numbers."""

import random
import re
from pathlib import Path

from jflash.files import json_lines


def read_gsm8k(path: Path) -> list[tuple[str, str]]:
    """Questions and answers of a GSM8K file, calculator marks `<<…>>` removed."""
    found = []
    for where, record in json_lines(path):
        try:
            question, answer = record["question"].strip(), record["answer"].strip()
        except (KeyError, AttributeError) as error:
            raise ValueError(f"{where} is not a GSM8K record: {error!r}") from None
        found.append((question, re.sub(r"<<.*?>>", "", answer).strip()))
    return found


def renumbered(question: str, rng: random.Random) -> str:
    """The question with every number replaced by another of as many digits.

    The target has learnt GSM8K's training answers; what it says to a question that it does not know
    is another kind of text, and the one that the drafter meets.
    """

    def other(match: re.Match[str]) -> str:
        digits = len(match[0])
        return str(rng.randint(max(2, 10 ** (digits - 1)), 10**digits - 1))

    return re.sub(r"\d+", other, question)
