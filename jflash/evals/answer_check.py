"""Is an answer in words the right one: what it says is found by a rule, math-verify compares.

The rule that applied is recorded, because the rules differ in trust. Knows no model.
"""

import logging
import re
from typing import NamedTuple

SECONDS = 3  # for one comparison: 9^(9^(9^9)) is an answer too
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
UNIT = re.compile(r"(-?\$?[\d,]*\.?\d+)\s*[A-Za-z][A-Za-z ]*\.?")


class Check(NamedTuple):
    """What an answer said, how that was found, and whether it is right."""

    answer: str | None
    rule: str  # 'boxed', 'hashes', 'last number' or 'none'
    correct: bool


def check_answer(text: str, gold: str) -> Check:
    """Judges `text` by `gold`, an expression in LaTeX or a number as people write it."""
    answer, rule = extract_answer(text)
    return Check(answer, rule, answer is not None and is_equal(answer, gold))


def extract_answer(text: str) -> tuple[str | None, str]:
    r"""The last \boxed{…}, else what follows the last ####, else the last number, else None."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed, "boxed"
    hashes = re.findall(r"####[ \t]*(\S[^\n]*)", text)
    if hashes:
        return hashes[-1].strip(), "hashes"
    numbers = NUMBER.findall(text)
    if numbers:
        return numbers[-1].rstrip(","), "last number"
    return None, "none"


def is_equal(answer: str, gold: str) -> bool:
    """Whether two expressions say the same; not if that takes longer than SECONDS to find out."""
    if answer == gold:
        return True
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a comparison given up is no news
    # "18 apples." is 18: LaTeX would read a product of letters.
    unit = UNIT.fullmatch(answer)
    said = unit[1] if unit else answer
    right, found = (math_verify.parse(f"${e}$", parsing_timeout=SECONDS) for e in (gold, said))
    return math_verify.verify(right, found, timeout_seconds=SECONDS)


def _last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed whose braces are closed."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start:i].strip() or None
    return None
