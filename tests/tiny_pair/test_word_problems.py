"""The made-up word problems are right, readable, within their limits and split cleanly."""

import re
from collections import Counter
from functools import cache
from hashlib import sha256
from itertools import islice

import pytest

import make_word_problems
from jflash.cli.command import BAD_INPUT, run_command
from jflash.cli.prompts import DEFAULT_PROMPT
from jflash.training.prompts import overlap
from tests.support.refusals import one_line
from tiny_pair.word_problems import (
    TEMPLATES,
    Problem,
    Split,
    extract_result,
    in_eval,
    is_correct,
    problems,
)
from tiny_pair.word_problems.draft import Draft, Rng
from tiny_pair.word_problems.templates import Template
from tiny_pair.word_problems.words import PEOPLE

HELD_OUT = {t.name for templates in TEMPLATES.values() for t in templates if t.taught_by}
ALL = [(steps, template) for steps, templates in TEMPLATES.items() for template in templates]
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
each_template = pytest.mark.parametrize(
    ("steps", "template"), ALL, ids=[template.name for _, template in ALL]
)


def value(a: int, op: str, b: int) -> int:
    """The value of one step, after a check that its numbers keep to the limits."""
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        assert (min(a, b) <= 12, max(a, b) <= 40) == (True, True), (a, b)
        return a * b
    assert (b <= 12, a % b) == (True, 0), (a, b)
    return a // b


def check_solution(numbers: tuple[int, ...], lines: tuple[str, ...], result: int) -> None:
    """Each line is one right equation of numbers that are given or found before; all are used."""
    known, unused, last = set(numbers), set(numbers), None
    for line in lines:
        (equation,) = EQUATION.findall(line)
        assert len(re.findall(r"=", line)) == 1
        a, op, b, last = int(equation[0]), equation[1], int(equation[2]), int(equation[3])
        assert {a, b} <= known, line
        assert value(a, op, b) == last, line
        assert 2 <= last <= 500, line
        known.add(last)
        unused -= {a, b}
    assert last == result
    assert not unused, (numbers, lines)


def check_grammar(text: str) -> None:
    assert re.fullmatch(r"[A-Z0-9].*[.?]", text), text
    assert not re.search(
        r"[{}]|  |\b[01] [a-z]|\b[Aa] [aeiou]|\b[Aa]n (?!hour)[^aeiou]|None", text
    ), text
    assert not re.search(r"\b(?:a|an|each|every|one) \w+(?:ches|xes|ies|ks|rs)\b", text), text


@cache  # drawing is slow under the type checks of the test run
def draws(template: Template) -> list[Draft]:
    r = Rng(1)
    return [template.draw(r) for _ in range(500)]


@cache
def drawn_from(split: Split) -> list[Problem]:
    return list(problems(split, seed=3, limit=1500))


@each_template
def test_template_solution(steps: int, template: Template) -> None:
    for draft in draws(template):
        assert len(draft.lines) == steps
        assert all(2 <= number <= 500 for number in draft.numbers)
        check_solution(draft.numbers, draft.lines, draft.result)


@each_template
def test_template_wording(steps: int, template: Template) -> None:
    for draft in draws(template):
        assert 2 <= len(set(draft.questions)) <= 4
        for question in draft.questions:
            given = [int(number) for number in re.findall(r"\d+", question)]
            assert sorted(given) == sorted(draft.numbers), question
            assert question.count("?") == 1
            check_grammar(question)
        for line in draft.lines:
            check_grammar(line)
            # Whoever the answer names must be in every wording of the question.
            for word in re.findall(r"[A-Z]\w+", line[1:]):
                assert all(word in question for question in draft.questions), word


@each_template
def test_template_variety(steps: int, template: Template) -> None:
    drafts = draws(template)
    numbers = {draft.numbers for draft in drafts}
    assert len(numbers) >= 200
    assert 0.05 < sum(in_eval(template.name, each) for each in numbers) / len(numbers) < 0.15
    assert Counter(draft.result for draft in drafts).most_common(1)[0][1] <= 65


def test_template_counts() -> None:
    names = [template.name for _, template in ALL]
    assert len(set(names)) == len(names) >= 45
    assert len(HELD_OUT) == 8
    for template in (t for _, t in ALL if t.taught_by):
        assert set(template.taught_by.split(", ")) <= set(names) - HELD_OUT
    assert sorted(TEMPLATES) == [1, 2, 3, 4, 5]
    for templates in TEMPLATES.values():
        held_out = [t for t in templates if t.taught_by]
        assert held_out
        assert len(templates) >= 9
    assert len({person.name for person in PEOPLE}) >= 60


@pytest.mark.parametrize("split", ["train", "eval", "held_out"])
def test_split(split: Split) -> None:
    drawn = drawn_from(split)
    assert len(drawn) == 1500
    assert drawn[:100] == list(islice(problems(split, seed=3), 100))
    assert drawn[:10] != list(problems(split, seed=4, limit=10))
    assert all((p.template in HELD_OUT) == (split == "held_out") for p in drawn)
    if split != "held_out":
        assert all(in_eval(p.template, p.numbers) == (split == "eval") for p in drawn)
    counts = Counter(p.steps for p in drawn)
    assert sorted(counts) == [1, 2, 3, 4, 5]
    assert all(240 < number < 360 for number in counts.values())
    assert Counter(p.result for p in drawn).most_common(1)[0][1] < 45
    for problem in drawn:
        *lines, last = problem.answer.split("\n")
        assert len(lines) == problem.steps
        assert last == f"#### {problem.result}"
        assert is_correct(problem.answer, problem)


def test_the_embedded_pairs_problems_stay_the_same() -> None:
    drawn = [*problems("train", seed=1, limit=200), *problems("held_out", seed=100, limit=200)]
    text = "\n".join(f"{p.question}\n{p.answer}" for p in drawn)
    assert sha256(text.encode()).hexdigest().startswith("9459a9bfddccd728")


def test_train_and_eval_are_disjoint() -> None:
    def parts(split: Split) -> tuple[set[tuple[str, tuple[int, ...]]], set[str]]:
        drawn = drawn_from(split)
        return {(p.template, p.numbers) for p in drawn}, {p.question for p in drawn}

    train, evaluation = parts("train"), parts("eval")
    assert train[0].isdisjoint(evaluation[0])
    assert train[1].isdisjoint(evaluation[1])


def test_a_wrong_split_is_refused_at_once() -> None:
    # A ValueError, or what the type checks of the test run make of it.
    with pytest.raises(Exception, match="'test'"):
        problems("test", seed=0)  # pyright: ignore[reportArgumentType]


def test_default_prompt_is_never_trained_on() -> None:
    default = next(problems("eval", seed=38))
    assert default.question == DEFAULT_PROMPT
    assert default.steps in (4, 5)
    assert default.template not in HELD_OUT
    # Its template draws no such numbers for `train`, and other templates have other wordings.
    assert in_eval(default.template, default.numbers)
    assert all(p.question != DEFAULT_PROMPT for p in drawn_from("train"))


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("Mia buys 3 * 4 = 12 apples.\n#### 12", 12),
        ("#### 7\nMore.\n####  -3 \n", -3),
        ("#### 7\r\n", 7),
        ("#### 12 apples", None),
        ("so #### 12", None),
        ("####", None),
        ("#### " + "9" * 5000, None),
        ("", None),
    ],
)
def test_extract_result(text: str, result: int | None) -> None:
    assert extract_result(text) == result


def test_overlap() -> None:
    reference = ["One two THREE four", "five"]
    assert overlap(["zero one  two\nthree", "two three five", "five"], reference, n=3) == [
        "zero one  two\nthree"
    ]
    assert overlap(["five"], reference, n=1) == ["five"]


def test_the_script_says_where_it_cannot_write(capsys, tmp_path):
    parser, below = make_word_problems.make_parser(), str(tmp_path / "missing" / "a.jsonl")
    assert run_command(parser, make_word_problems.main, ["--output", below]) == BAD_INPUT
    one_line(capsys, "make_word_problems.py: cannot write", below, "No such file or directory")
