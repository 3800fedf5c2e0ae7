"""Grade-school maths word problems, made up without end, to train and evaluate a tiny model.

Every problem has an answer of one short sentence per step, each with its equation, and a last
line `#### result`.  Templates draw names, things and numbers; some templates are held out, so that
a model's score on stories it never saw can be told from its score on new numbers in known stories.

    for problem in problems("train", seed=0, limit=3):
        print(problem.question, problem.answer, sep="\\n")
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

from tiny_pair.word_problems.draft import Rng
from tiny_pair.word_problems.templates import TEMPLATES

__all__ = [
    "TEMPLATES",
    "Problem",
    "Split",
    "extract_result",
    "in_eval",
    "is_correct",
    "problems",
]

Split = Literal["train", "eval", "held_out"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, its worked answer and the number it comes to.

    `numbers` are the numbers of the question, in the template's own order.
    """

    template: str
    steps: int
    numbers: tuple[int, ...]
    question: str
    answer: str
    result: int


def in_eval(template: str, numbers: tuple[int, ...]) -> bool:
    """Whether this draw of a template is one of the tenth kept from training.

    It hangs on the numbers alone, as the same numbers under another name are the same exercise.
    """
    digest = hashlib.blake2b(f"{template} {numbers}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % 10 == 0


def problems(split: Split, seed: int, limit: int | None = None) -> Iterator[Problem]:
    """Problems of a split, as many as `limit` (or without end), always the same for a seed.

    All step counts are equally frequent; within one, so are the split's templates.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}, not one of {', '.join(get_args(Split))}")
    return _generate(split, Rng(seed), limit)


def _generate(split: Split, r: Rng, limit: int | None) -> Iterator[Problem]:
    held_out = split == "held_out"
    usable = {
        steps: [t for t in templates if bool(t.taught_by) == held_out]
        for steps, templates in TEMPLATES.items()
    }
    for _ in count() if limit is None else range(limit):
        steps = r.between(1, 5)
        template = r.pick(usable[steps])
        draft = template.draw(r)
        while not held_out and in_eval(template.name, draft.numbers) != (split == "eval"):
            draft = template.draw(r)
        yield Problem(
            template=template.name,
            steps=steps,
            numbers=draft.numbers,
            question=r.pick(draft.questions),
            answer="\n".join((*draft.lines, f"#### {draft.result}")),
            result=draft.result,
        )


def extract_result(text: str) -> int | None:
    """The number on the last line `#### N` of a model's output, or None without one."""
    found = re.findall(r"^####[ \t]*(-?[0-9]{1,9})[ \t]*\r?$", text, flags=re.MULTILINE)
    return int(found[-1]) if found else None


def is_correct(text: str, problem: Problem) -> bool:
    """Whether a model's output ends in the right number."""
    return extract_result(text) == problem.result
