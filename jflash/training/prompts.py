"""Prompts to train a drafter on, from files at hand, each with its source; never from a test set.

Asked as benchmarks ask, where they do: a drafter learns how its target answers, and that depends on
the question's form.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jflash.files import json_lines
from jflash.training.gsm8k import read_gsm8k, renumbered
from jflash.training.overlap import overlap

TEST_FIELDS = ("question", "problem", "prompt", "text", "turns")
SHARED_WORDS = 13  # in a row, with a test question
SHORTEST_WORDS = 4  # of a test question that no prompt may hold: fewer occur by chance
# How the reference's benchmark asks for a result.
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


class Prompt(NamedTuple):
    """What a user asks, and where it is from."""

    text: str
    source: str


def gsm8k_prompts(train: Path, variants: int, seed: int) -> list[Prompt]:
    """Every question of GSM8K's training set, and as many variants of it with other numbers."""
    questions = [question for question, _ in read_gsm8k(train)]
    rng = random.Random(seed)
    asked = [Prompt(boxed(question), "gsm8k-train") for question in questions]
    for _ in range(variants):
        asked += [Prompt(boxed(renumbered(q, rng)), "gsm8k-renumbered") for q in questions]
    return asked


def question_prompts(file: Path) -> list[Prompt]:
    """Questions of any JSON lines, `question` and perhaps `source`, by default the file's name."""
    found = []
    for where, record in json_lines(file):
        question, source = record.get("question"), record.get("source", file.stem)
        if not isinstance(question, str) or not isinstance(source, str) or not question.strip():
            raise ValueError(f"{where} needs a text `question`, and `source` must be a text")
        found.append(Prompt(boxed(question.strip()), source))
    return found


def svamp_prompts(file: Path) -> list[Prompt]:
    """SVAMP's stories with their questions; ValueError for a file of another kind."""
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not SVAMP's JSON: {error}") from None
    if not isinstance(records, list):
        raise ValueError(f"{file} is not SVAMP's JSON: it holds no list")
    found = []
    for number, record in enumerate(records, start=1):
        try:
            body, question = record["Body"].strip(), record["Question"].strip()
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} entry {number} is no SVAMP problem: {error!r}") from None
        stop = "" if body.endswith((".", "?", "!")) else "."
        found.append(Prompt(boxed(f"{body}{stop} {question}"), "svamp"))
    return found


def self_instruct_prompts(file: Path) -> list[Prompt]:
    """An instruction with each of its inputs."""
    found = []
    for where, record in json_lines(file):
        try:
            instruction = record["instruction"].strip()
            inputs = [instance["input"].strip() for instance in record["instances"]]
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{where} is no self-instruct task: {error!r}") from None
        for given in dict.fromkeys(inputs):
            text = f"{instruction}\n\n{given}" if given else instruction
            found.append(Prompt(text, "self-instruct"))
    return found


def boxed(question: str) -> str:
    """A problem in the style of the reference's benchmark."""
    return f"{question}\n{BOXED}"


def questions_of_tests(files: Iterable[Path]) -> list[str]:
    """All texts that test sets ask (JSON lines, gzipped or not); ValueError if a file has none."""
    found = []
    for file in files:
        before = len(found)
        for where, record in json_lines(file):
            for name in TEST_FIELDS:
                value = record.get(name) or []
                texts = [value] if isinstance(value, str) else value
                if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                    raise ValueError(f"{where}: {name} must be a text or a list of texts")
                found += texts
        if len(found) == before:
            raise ValueError(f"{file} has none of the fields {', '.join(TEST_FIELDS)}")
    return found


def collected(prompts: Iterable[Prompt], tests: Sequence[str]) -> tuple[list[Prompt], int]:
    """Different prompts that no test set asks, in their order, and how many were left out for that.

    Words count, without case and punctuation. Left out is what equals a test question, with the
    style's ending or without, shares 13 words in a row with one, or holds a whole one of 4 to 12.
    """
    different = list({normal(prompt.text): prompt for prompt in reversed(list(prompts))}.values())
    different.reverse()
    words = [normal(prompt.text.removesuffix(f"\n{BOXED}")) for prompt in different]
    known = {normal(test) for test in tests}
    shared = set(overlap(words, known, SHARED_WORDS))
    short = [t for t in known if SHORTEST_WORDS <= len(t.split()) < SHARED_WORDS]

    def asked(text: str) -> bool:
        return text in known or text in shared or any(f" {s} " in f" {text} " for s in short)

    kept = [prompt for prompt, text in zip(different, words, strict=True) if not asked(text)]
    return kept, len(different) - len(kept)


def normal(text: str) -> str:
    """The words alone, in lower case: two texts that differ in nothing else are the same."""
    numbers_whole = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())
    return " ".join(re.findall(r"[^\W_]+", numbers_whole))
