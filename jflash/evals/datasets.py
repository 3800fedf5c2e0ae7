"""Data sets to evaluate on: their sources, their fields, and the prompts that they make.

They come from the hub by the `datasets` library, or from a file of JSON lines with the same fields.
This file knows no model and no tokenizer.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jflash.system.json_lines import json_lines
from jflash.training.prompts import BOXED, without_marks

Record = dict[str, Any]
Style = Callable[[Record], str]

REFERENCE_SHUFFLE, REFERENCE_COUNT = 42, 128  # the order and number of the authors' benchmark
HASHES = 'Please reason step by step, and end with a line "#### " followed by the answer alone.'
NEXT_EXAMPLE = "\nQuestion:"  # where a base model, shown examples, goes on to the next of them


class Problem(NamedTuple):
    """A problem: the user's turns, and what its answer is checked against."""

    index: int  # its place in the data set, from 0
    turns: list[str]
    gold: str | None  # the right answer, of a problem of mathematics
    record: Record


@dataclass(frozen=True, kw_only=True)
class Dataset:
    hub: str
    config: str | None
    split: str
    kind: Literal["math", "code", "chat"]
    fields: tuple[tuple[str, ...], ...]  # each a text under one of these names
    styles: dict[str, Style]
    turns: tuple[str, ...] = ()  # a list of texts under one of these names
    tests: str | None = None  # a list of texts
    worked: str = ""  # the field of a whole worked answer, for few-shot prompts


def _text(*names: str, before: str = "", after: str = "") -> Style:
    return lambda record: before + record[_present(record, names)] + after


def _with_tests(record: Record) -> str:
    tests = "\n".join(record["test_list"])
    return (
        f"{record[_present(record, MBPP_TEXT)]} "
        f"Your function must pass these tests:\n```python\n{tests}\n```"
    )


MBPP_TEXT = ("prompt", "text")
FENCED = "Write a solution to the following problem and make sure that it passes the tests:"


def _mathematics(question: str) -> dict[str, Style]:
    return {
        "reference": _text(question, after="\n" + BOXED),
        "hashes": _text(question, after="\n" + HASHES),
        "plain": _text(question),
    }


DATASETS = {
    "gsm8k": Dataset(
        hub="openai/gsm8k", config="main", split="test", kind="math",
        fields=(("question",), ("answer",)), styles=_mathematics("question"), worked="answer",
    ),
    "math500": Dataset(
        hub="HuggingFaceH4/MATH-500", config=None, split="test", kind="math",
        fields=(("problem",), ("answer",)), styles=_mathematics("problem"), worked="solution",
    ),
    "humaneval": Dataset(
        hub="openai/openai_humaneval", config=None, split="test", kind="code",
        fields=(("prompt",), ("test",), ("entry_point",)),
        styles={
            "reference": _text("prompt", before=f"{FENCED}\n```python\n", after="\n```"),
            "plain": _text("prompt"),
        },
    ),
    "mbpp": Dataset(
        hub="google-research-datasets/mbpp", config="sanitized", split="test", kind="code",
        fields=(MBPP_TEXT,), tests="test_list",
        styles={
            "reference": _text(*MBPP_TEXT),
            "tests": _with_tests,
            "plain": _text(*MBPP_TEXT),
        },
    ),
    "mt-bench": Dataset(
        hub="HuggingFaceH4/mt_bench_prompts", config=None, split="train", kind="chat",
        fields=(), turns=("prompt", "turns"), styles={"reference": str, "plain": str},
    ),
}  # fmt: skip


def load_problems(
    name: str,
    file: Path | None = None,
    *,
    style: str = "reference",
    examples: Sequence[tuple[str, str]] = (),
    shuffle: int | None = None,
    limit: int | None = None,
) -> list[Problem]:
    """The problems of a data set, from `file` if given; ValueError that names what is wrong.

    `examples` are questions with worked answers that come before every question (few-shot).
    `shuffle` is the seed of Python's shuffling, which comes before `limit`.
    """
    dataset = DATASETS[name]
    if style not in dataset.styles:
        raise ValueError(f"{name} has the prompt styles {', '.join(dataset.styles)}, not {style!r}")
    if examples and dataset.kind != "math":
        raise ValueError(f"few-shot examples are for gsm8k and math500, not for {name}")
    if limit is not None and limit < 1:
        raise ValueError(f"a limit of {limit} problems: at least 1")
    records = _records(dataset, dataset.split, file)
    for place, record in records:
        _check(dataset, record, place)
    problems = [_problem(dataset, i, r, style, examples) for i, (_, r) in enumerate(records)]
    if shuffle is not None:
        random.Random(shuffle).shuffle(problems)
    return problems[:limit]


def load_examples(name: str, count: int, file: Path | None) -> list[tuple[str, str]]:
    """The first `count` questions with their worked answers; without a file GSM8K's from the hub.

    GSM8K's calculator marks `<<…>>` are left out.
    """
    dataset = DATASETS[name]
    if dataset.kind != "math":
        raise ValueError(f"few-shot examples are for gsm8k and math500, not for {name}")
    if file is None and name != "gsm8k":
        raise ValueError(f"few-shot examples for {name} need a file of them")
    records = _records(dataset, "train", file, "--few-shot-data")
    question = dataset.fields[0][0]
    examples = []
    for place, record in records[:count]:
        for field in (question, dataset.worked):
            _text_field(record, (field,), place)
        examples.append((record[question], without_marks(record[dataset.worked])))
    if len(examples) < count:
        raise ValueError(
            f"{count} examples are wanted, {file or dataset.hub} holds {len(examples)}"
        )
    return examples


def _problem(
    dataset: Dataset, index: int, record: Record, style: str, examples: Sequence[tuple[str, str]]
) -> Problem:
    if dataset.turns:
        turns = list(record[_present(record, dataset.turns)])
    else:
        turns = [dataset.styles[style](record)]
    if examples:
        shown = [f"Question: {question}\nAnswer: {answer}" for question, answer in examples]
        turns = ["\n\n".join([*shown, f"Question: {turns[0]}\nAnswer:"])]
    gold = gold_answer(record["answer"]) if dataset.kind == "math" else None
    return Problem(index, turns, gold, record)


def gold_answer(answer: str) -> str:
    """The text after the last ####, as in GSM8K, else the whole text."""
    return answer.rpartition("####")[2].strip()


def _check(dataset: Dataset, record: Record, place: str) -> None:
    for names in dataset.fields:
        _text_field(record, names, place)
    for names in (dataset.turns, (dataset.tests,) if dataset.tests else ()):
        if names:
            value = record[_present(record, names, place)]
            if not (isinstance(value, list) and value and all(isinstance(t, str) for t in value)):
                raise ValueError(f"{place}{' or '.join(names)} must be a list of texts")
    if dataset.tests:  # what MBPP's records may hold besides, read when programs run
        setup, imports = record.get("test_setup_code"), record.get("test_imports")
        if not isinstance(setup, str | None):
            raise ValueError(f"{place}test_setup_code must be a text, not {setup!r}")
        listed = isinstance(imports, list) and all(isinstance(line, str) for line in imports)
        if imports is not None and not listed:
            raise ValueError(f"{place}test_imports must be a list of texts, not {imports!r}")
    if dataset.kind == "math" and not gold_answer(record["answer"]):
        raise ValueError(f"{place}answer holds no final answer")


def _text_field(record: Record, names: Sequence[str], place: str) -> None:
    value = record[_present(record, names, place)]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}{' or '.join(names)} must be a text, not {value!r}")


def _present(record: Record, names: Sequence[str], place: str = "") -> str:
    """The first of the names that the record has."""
    present = [name for name in names if name in record]
    if not present:
        has = ", ".join(map(str, record)) or "nothing"
        raise ValueError(f"{place}the field {' or '.join(names)} is missing (it has {has})")
    return present[0]


def _records(
    dataset: Dataset, split: str, file: Path | None, option: str = "--data"
) -> list[tuple[str, Record]]:
    """Each record after the words that begin an error about it; `option` would name the file."""
    if file is None:
        rows = enumerate(_from_hub(dataset, split, option))
        return [(f"{dataset.hub} row {i}: ", record) for i, record in rows]
    records = [(f"{where}: ", record) for where, record in json_lines(file)]
    if not records:
        raise ValueError(f"{file} holds no problems")
    return records


def _from_hub(dataset: Dataset, split: str, option: str) -> list[Record]:
    import datasets
    import huggingface_hub

    unreachable = ""
    try:  # a single request: the library would try again for half a minute
        huggingface_hub.HfApi().dataset_info(dataset.hub, timeout=10)
    except Exception as why:  # of any HTTP library; shown if nothing is cached
        unreachable = _first_line(why)
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(dataset.hub, dataset.config, split=split)
    except (OSError, ValueError) as error:  # the library's errors are OSErrors
        fields = [names[0] for names in (*dataset.fields, dataset.turns, (dataset.tests,)) if names]
        wanted = ", ".join(name for name in fields if name)
        raise ValueError(
            f"{dataset.hub} cannot be had from the hub ({unreachable or _first_line(error)}): give "
            f"the data with {option} FILE.jsonl, an object a line with {wanted}"
        ) from None
    return [dict(row) for row in rows]


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__
