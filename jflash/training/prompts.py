"""Prompts to train a drafter on, from files at hand, each with its source; never from a test set.

A drafter learns how its target answers, and that depends on the question's form: problems of
mathematics get the words with which benchmarks ask for a result.
"""

import contextlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jflash.system.files import UTF_8
from jflash.system.json_lines import check_characters, json_lines

TEST_FIELDS = ("question", "problem", "prompt", "text", "turns")
SHARED_WORDS = 13  # in a row, with a test question
SHORTEST_WORDS = 4  # of a test question that no prompt may hold: fewer occur by chance
MARKS = ".,;:!?…\"'“”‘’()[]{}"
# How the reference's benchmark asks for a result.
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


class Prompt(NamedTuple):
    text: str
    source: str


def boxed(question: str) -> str:
    """A problem in the style of the reference's benchmark."""
    return f"{question}\n{BOXED}"


@contextlib.contextmanager
def _reading(where: str, kind: str) -> Iterator[None]:
    """Turns the errors of a record without the expected fields into a ValueError about it."""
    try:
        yield
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where} is no {kind}: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _asked(record: dict[str, str], name: str) -> str:
    """A field without the whitespace around it; ValueError if nothing is left."""
    text = record[name].strip()
    if not text:
        raise ValueError(f"{name} is empty")
    return text


def read_gsm8k(path: Path) -> list[tuple[str, str]]:
    """Questions and answers of a GSM8K file, without calculator marks `<<…>>`."""
    records = []
    for where, record in json_lines(path):
        with _reading(where, "GSM8K record"):
            question, answer = _asked(record, "question"), record["answer"].strip()
            records.append((question, without_marks(answer)))
    return records


def without_marks(answer: str) -> str:
    """A worked answer of GSM8K without its calculator marks `<<…>>`."""
    return re.sub(r"<<.*?>>", "", answer).strip()


def renumbered(question: str, rng: random.Random) -> str:
    """The question with every number replaced by another of as many digits.

    The target has learnt GSM8K's training answers; it answers a question that it does not know in
    another way, and that is the kind of text which the drafter meets.
    """

    def other(match: re.Match[str]) -> str:
        digits = len(match[0])
        return str(rng.randint(max(2, 10 ** (digits - 1)), 10**digits - 1))

    return re.sub(r"\d+", other, question)


def gsm8k_prompts(train: Path, variants: int, seed: int) -> list[Prompt]:
    """Every question of GSM8K's training set, and `variants` of each with other numbers."""
    questions = [question for question, _ in read_gsm8k(train)]
    rng = random.Random(seed)
    prompts = [Prompt(boxed(question), "gsm8k-train") for question in questions]
    for _ in range(variants):
        prompts += [Prompt(boxed(renumbered(q, rng)), "gsm8k-renumbered") for q in questions]
    return prompts


def question_prompts(file: Path) -> list[Prompt]:
    """Questions of JSON lines with `question` and perhaps `source`, by default the file's name."""
    prompts = []
    for where, record in json_lines(file):
        question, source = record.get("question"), record.get("source", file.stem)
        if not isinstance(question, str) or not isinstance(source, str) or not question.strip():
            raise ValueError(f"{where} needs a text `question`, and `source` must be a text")
        prompts.append(Prompt(boxed(question.strip()), source))
    return prompts


def svamp_prompts(file: Path) -> list[Prompt]:
    """SVAMP's stories with their questions."""
    try:
        records = json.loads(file.read_text(encoding=UTF_8))
    except RecursionError:
        raise ValueError(f"{file} is not SVAMP's JSON here: it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{file} is not SVAMP's JSON: {error}") from None
    if not isinstance(records, list):
        raise ValueError(f"{file} is not SVAMP's JSON: it holds no list")
    prompts = []
    for number, record in enumerate(records, start=1):
        where = f"{file} entry {number}"
        check_characters(record, where)
        with _reading(where, "SVAMP problem"):
            body, question = _asked(record, "Body"), _asked(record, "Question")
            stop = "" if body.endswith((".", "?", "!")) else "."
            prompts.append(Prompt(boxed(f"{body}{stop} {question}"), "svamp"))
    return prompts


def self_instruct_prompts(file: Path) -> list[Prompt]:
    """An instruction with each of its inputs."""
    prompts = []
    for where, record in json_lines(file):
        with _reading(where, "self-instruct task"):
            instruction = _asked(record, "instruction")
            inputs = [instance["input"].strip() for instance in record["instances"]]
        for given in dict.fromkeys(inputs):
            text = f"{instruction}\n\n{given}" if given else instruction
            prompts.append(Prompt(text, "self-instruct"))
    return prompts


def questions_of_tests(files: Iterable[Path]) -> list[str]:
    """All texts that test sets ask (JSON lines, gzipped or not); ValueError if a file has none."""
    questions = []
    for file in files:
        before = len(questions)
        for where, record in json_lines(file):
            for name in TEST_FIELDS:
                value = record.get(name) or []
                texts = [value] if isinstance(value, str) else value
                if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                    raise ValueError(f"{where}: {name} must be a text or a list of texts")
                questions += texts
        if len(questions) == before:
            raise ValueError(f"{file} has none of the fields {', '.join(TEST_FIELDS)}")
    return questions


def collected(prompts: Iterable[Prompt], tests: Sequence[str]) -> tuple[list[Prompt], int]:
    """Different prompts that no test set asks, in their order, and how many were left out for that.

    Prompts that differ in case, spaces and the marks around words are the same. For tests only
    words count. A prompt is left out if it equals a test question (with the style's ending or
    without), shares 13 words in a row with one, or holds a whole one of 4 to 12 words.
    """
    different = list(
        {_unmarked(prompt.text): prompt for prompt in reversed(list(prompts))}.values()
    )
    different.reverse()
    words = [normal(prompt.text.removesuffix(f"\n{BOXED}")) for prompt in different]
    known = {normal(test) for test in tests}
    shared = set(overlap(words, known, SHARED_WORDS))
    short = [t for t in known if SHORTEST_WORDS <= len(t.split()) < SHARED_WORDS]

    def is_test(text: str) -> bool:
        return text in known or text in shared or any(f" {s} " in f" {text} " for s in short)

    kept = [prompt for prompt, text in zip(different, words, strict=True) if not is_test(text)]
    return kept, len(different) - len(kept)


def _unmarked(text: str) -> str:
    """The text in lower case without marks around its words: signs such as + and - stay."""
    words = (word.strip(MARKS) or word for word in text.lower().split())
    return " ".join(words)


def normal(text: str) -> str:
    """The words in lower case: texts that differ only in marks and case are the same."""
    numbers_whole = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())
    return " ".join(re.findall(r"[^\W_]+", numbers_whole))


def overlap(texts: Iterable[str], reference_texts: Iterable[str], n: int = 13) -> list[str]:
    """The texts that share a run of n words with a reference text, such as a test set.

    Whitespace separates words, and case does not matter; a text of fewer than n words has no run
    and is never returned.
    """
    reference = set[tuple[str, ...]]().union(*(_runs(text, n) for text in reference_texts))
    return [text for text in texts if not reference.isdisjoint(_runs(text, n))]


def _runs(text: str, n: int) -> set[tuple[str, ...]]:
    words = text.casefold().split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
