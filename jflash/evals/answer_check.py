"""Checks an answer in words: a rule extracts its result, and math-verify compares it with the gold.

A check records the rule, because some rules deserve less trust. This file knows no model.
"""

import logging
import re
from fractions import Fraction
from typing import NamedTuple

SECONDS = 3  # for one comparison: 9^(9^(9^9)) is an answer too
LONGEST = 500  # characters of an expression; longer ones are no answer, and slow to compare
WHOLE = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)")  # as people write it: -7, 1,000
# What a number's first digits may mean with the word after it; a letter only after a currency: $2M.
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
LETTERS = {"k": 10**3, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9}
SCALE = rf"(?:[ \u00a0-]?(?i:(?:{'|'.join(SCALES)})s?)\b)"
SIGNS = r"(?:\\?\$|[£€¥])"
SEPARATOR = r"(?:\{,\}|\\[,;:! ]|[ \u00a0\u202f\u2009~'\u2019_])"  # of thousands; or a comma
POWER = r"\^(?:\{-?\d+\}|-?\d+)"
# A dash after a digit or a letter is no sign: the last number of "18-20 days" is 20.
# The sign may be Unicode's minus, and no digit need stand before the point: −18, $.50.
# What belongs to a number is no number of its own: 1 000, 2 million, 3 x 10^6, 18 cm^2, 1e6, 5:05.
NUMBER = re.compile(
    rf"(?:(?<![\w)])[-\u2212])?(?P<sign>{SIGNS})?(?<![\^\d])(?<!\^[-{{])(?<!\^\{{-)(?:"
    rf"(?<![\w.,])[1-9]\d{{0,2}}(?:{SEPARATOR}\d{{3}})+(?!{SEPARATOR}?\d|-[A-Za-z])(?:\.\d+)?"
    r"|\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)"
    rf"(?:/\d+|(?::\d+)+|[eE][+-]?\d+\b|{POWER}|\s?(?:\\times|\\cdot|[x\u00d7*])\s?10{POWER})?"
    rf"(?:{SCALE}|(?(sign)(?i:{'|'.join(LETTERS)})\b|))?"
)
SCALED = re.compile(
    rf"(?P<minus>[-\u2212]?)(?P<sign>{SIGNS}\s*)?"
    r"(?P<over>\d[\d,]*(?:\.\d+)?|\.\d+)(?:/(?P<under>\d+))?"
    rf"(?P<scale>{SCALE}|(?(sign)(?i:{'|'.join(LETTERS)})\b|(?!)))"
)
# A unit may be words with marks in them: 18 t-shirts, 18 students' books.
UNIT = re.compile(
    r"([-\u2212]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?)\s*/?\s*"
    r"[A-Za-z](?:[A-Za-z ]|(?<=[A-Za-z])(?:-(?=[A-Za-z])|['\u2019](?=[A-Za-z ])))*"
    r"(?:\^\{?[23]\}?|[²³])?(?:/[A-Za-z]+(?:\^2|²)?)?\.?"
)
THOUSANDS = re.compile(rf"(?<=\d)(?![ \u00a0]){SEPARATOR}(?=\d{{3}}(?!\d))")  # 1\,000
# A plain space parts thousands only where all digits of a number stand so: 1 000, no 1 125/1000.
SPACED = re.compile(r"(?<![\w.,^])[1-9]\d{0,2}(?:[ \u00a0]\d{3})+(?![ \u00a0]?[\d/])")
MARKS = re.compile(r"(\*\*|\*|__|`)(.+)\1(\.?)")  # Markdown around the whole
WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")  # LaTeX around the whole
CURRENCY = re.compile(r"^([-\u2212]?)(?:\\?\$|[£€¥])\s*|(?<=\d)\s*[£€¥]$")
HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
# How a line after #### begins that is an answer wherever it stands: a number or LaTeX, maybe after
# the word answer. Others are Markdown's headings if a text follows: "Step 1", "2. The sum".
RESULT = re.compile(
    r"(?:.{0,40}\banswer\b\D{0,20})?[^\w\n]*(?:(?<=\\)\w|\d[\d,]*+(?![.)] ))", re.IGNORECASE
)
LATEX = re.compile(r"\\[A-Za-z]+")
BRACES = re.compile(r"\\boxed\s*\{|[{}]")


class Check(NamedTuple):
    """The extracted result, the rule that extracted it, and whether it is right."""

    answer: str | None
    rule: str  # 'boxed', 'hashes', 'last number' or 'none'
    correct: bool


def check_answer(text: str, gold: str) -> Check:
    """Checks `text` against `gold`, an expression in LaTeX or a number as people write it."""
    answer, rule = extract_answer(text)
    return Check(answer, rule, answer is not None and is_equal(answer, gold))


def extract_answer(text: str) -> tuple[str | None, str]:
    r"""The last \boxed{…}, else what follows the last ####, else the last number, else None.

    A heading of four hashes is no answer.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed, "boxed"
    end = len(text.rstrip())
    for line in reversed([*HASHES.finditer(text)]):
        if line.end() >= end or RESULT.match(line[1]):
            return line[1].strip(), "hashes"
    numbers = [number[0] for number in NUMBER.finditer(text)]
    if numbers:
        return numbers[-1].rstrip(","), "last number"
    return None, "none"


def load() -> None:
    """Makes a comparison: the first one's imports take a second, in which a device would wait."""
    is_equal("0.5", "1/2")


def is_equal(answer: str, gold: str) -> bool:
    """Whether two expressions are equal; False if the comparison takes longer than SECONDS.

    Whole numbers, which most answers are, do not need math-verify's milliseconds.
    """
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > LONGEST:
        return False
    if WHOLE.fullmatch(answer) and WHOLE.fullmatch(gold):
        return int(answer.replace(",", "")) == int(gold.replace(",", ""))
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs time-outs
    # A letter of 3x is no unit.
    bare = _bare(answer, units=not re.search(r"[A-Za-z]", LATEX.sub("", gold)))
    both = (_joined(gold), _joined(bare))
    right, given = (math_verify.parse(f"${e}$", parsing_timeout=SECONDS) for e in both)
    return math_verify.verify(right, given, timeout_seconds=SECONDS)


def _bare(answer: str, units: bool) -> str:
    """An answer without marks around it and currency, and if it may have some without `units`:
    "**£18**" and "18 apples." are 18. LaTeX would read a unit as a product of letters.
    """
    while around := MARKS.fullmatch(answer) or WORDS.fullmatch(answer):
        answer = (around[2] if around.re is MARKS else around[1]).strip()
    if units:
        answer = _joined(WORDS.sub(r"\1", answer))
        if number := SCALED.match(answer):
            answer = _scaled(number) + answer[number.end() :]
    answer = CURRENCY.sub(r"\1", answer)
    unit = UNIT.fullmatch(answer) if units else None
    return unit[1] if unit else answer


def _scaled(number: re.Match[str]) -> str:
    """Its value in digits: 2000000 of "$2 million" and of "$2M"."""
    word = number["scale"].lower().strip(" \u00a0-")
    scale = LETTERS.get(word) or SCALES[word.removesuffix("s")]
    over, under = Fraction(number["over"].replace(",", "")), int(number["under"] or 1)
    return f"{number['minus']}{over * scale / under}" if under else number[0]


def _joined(expression: str) -> str:
    """The expression without what parts thousands, but commas, which math-verify knows."""
    joined = THOUSANDS.sub("", expression)
    return SPACED.sub(lambda number: "".join(number[0].split()), joined)


def _last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed whose braces are closed."""
    last, open_boxes = (-1, -1), list[int]()  # begin and end; begins, -1 of other braces
    for brace in BRACES.finditer(text):
        if brace[0] != "}":
            open_boxes.append(-1 if brace[0] == "{" else brace.end())
        elif open_boxes:
            last = max(last, (open_boxes.pop(), brace.start()))
    begin, end = last
    return None if begin < 0 else text[begin:end].strip() or None
