"""Data sets: what is asked, in which order, and bad data refused with the line that is wrong."""

import gzip
import json
import random
from pathlib import Path

import pytest

from jflash.evals import datasets
from jflash.evals.datasets import DATASETS, load_examples, load_problems

GSM8K = [
    {
        "question": f"What is {i} + {i}?",
        "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}",
    }
    for i in range(200)
]
ROWS = {
    "gsm8k": GSM8K[3],
    "math500": {"problem": "1 + 1?", "solution": r"It is \boxed{2}.", "answer": "2", "level": 1},
    "humaneval": {"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"},
    "mbpp": {"prompt": "Write f.", "test_list": ["assert f()"], "task_id": 1},
    "mt-bench": {"turns": ["Write.", "Again."], "category": "writing"},
}


def write(file: Path, rows: list) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "style", "turns"),
    [
        (
            "gsm8k",
            "reference",
            ["What is 3 + 3?\nPlease reason step by step, and put your final answer within "
             "\\boxed{}."],
        ),
        ("gsm8k", "plain", ["What is 3 + 3?"]),
        ("math500", "plain", ["1 + 1?"]),
        (
            "humaneval",
            "reference",
            ["Write a solution to the following problem and make sure that it passes the tests:\n"
             "```python\ndef f():\n\n```"],
        ),
        ("humaneval", "plain", ["def f():\n"]),
        ("mbpp", "reference", ["Write f."]),
        (
            "mbpp",
            "tests",
            ["Write f. Your function must pass these tests:\n```python\nassert f()\n```"],
        ),
        ("mt-bench", "reference", ["Write.", "Again."]),
    ],
)  # fmt: skip
def test_problems_are_asked_in_a_style(tmp_path, name, style, turns):
    [problem] = load_problems(name, write(tmp_path / "d.jsonl", [ROWS[name]]), style=style)
    assert problem.turns == turns
    assert problem.gold == {"gsm8k": "6", "math500": "2"}.get(name)


def test_every_style_of_every_data_set_asks_something(tmp_path):
    for name, dataset in DATASETS.items():
        for style in dataset.styles:
            file = write(tmp_path / "d.jsonl", [ROWS[name]])
            assert load_problems(name, file, style=style)[0].turns[0].strip()


def test_the_authors_order(tmp_path):
    """Shuffled by Python's own generator, then cut; a problem keeps its place in the data."""
    file = write(tmp_path / "d.jsonl", GSM8K)
    want = list(range(200))
    random.Random(42).shuffle(want)
    found = load_problems("gsm8k", file, shuffle=42, limit=128)
    assert [p.index for p in found] == want[:128]
    assert [p.gold for p in found] == [str(2 * i) for i in want[:128]]
    assert [p.index for p in load_problems("gsm8k", file, limit=2)] == [0, 1]


def test_worked_examples_come_first(tmp_path):
    file = write(tmp_path / "d.jsonl", GSM8K)
    examples = load_examples("gsm8k", 2, file)
    problem = load_problems("gsm8k", file, style="plain", examples=examples)[7]
    assert problem.turns == [
        "Question: What is 0 + 0?\nAnswer: It is 0.\n#### 0\n\n"
        "Question: What is 1 + 1?\nAnswer: It is 2.\n#### 2\n\n"
        "Question: What is 7 + 7?\nAnswer:"
    ]


def test_compressed_data_is_read(tmp_path):
    file = tmp_path / "d.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(ROWS["humaneval"]).encode()))
    assert load_problems("humaneval", file)[0].record == ROWS["humaneval"]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("gsm8k", "", "holds no problems"),
        ("gsm8k", "\n\n", "holds no problems"),
        ("gsm8k", json.dumps(GSM8K[0]) + '\n{"question": "x', r"d\.jsonl:2 is not JSON"),
        ("gsm8k", '\n["question"]', r"d\.jsonl:2 is not a JSON object: \[\"question\"\]"),
        (
            "gsm8k",
            '{"question": "x"}',
            r"l:1: the field answer is missing \(it has question\)",
        ),
        ("gsm8k", '{"question": "", "answer": "1"}', "question must be a text, not ''"),
        ("gsm8k", '{"question": "x", "answer": 1}', "answer must be a text, not 1"),
        ("gsm8k", '{"question": "x", "answer": "1 ####"}', "answer holds no final answer"),
        ("mbpp", '{"test_list": ["x"]}', "the field prompt or text is missing"),
        ("mbpp", '{"text": "x", "test_list": []}', "test_list must be a list of texts"),
        (
            "mbpp",
            '{"text": "x", "test_list": ["x"], "test_imports": "re"}',
            "must be a list of.* 're'",
        ),
        ("mbpp", '{"text": "x", "test_list": ["x"], "test_setup_code": 7}', "a text, not 7"),
        ("mt-bench", '{"turns": "x"}', "turns must be a list of texts"),
    ],
)
def test_bad_data_is_refused_with_its_line(tmp_path, name, text, named):
    file = tmp_path / "d.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        load_problems(name, file)


def test_what_cannot_be_read_or_asked(tmp_path):
    file = write(tmp_path / "d.jsonl", GSM8K)
    with pytest.raises(ValueError, match=r"nowhere.jsonl: no such file"):
        load_problems("gsm8k", tmp_path / "nowhere.jsonl")
    whole = gzip.compress(file.read_bytes())
    for content in (b"no gzip", whole[:-9], whole[:99] + b"damaged" + whole[106:]):
        (tmp_path / "d.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"d.gz cannot be read"):
            load_problems("gsm8k", tmp_path / "d.gz")
    with pytest.raises(ValueError, match="styles reference, hashes, plain, not 'odd'"):
        load_problems("gsm8k", file, style="odd")
    with pytest.raises(ValueError, match="limit of 0"):
        load_problems("gsm8k", file, limit=0)
    with pytest.raises(ValueError, match=r"300 examples are wanted, .* holds 200"):
        load_examples("gsm8k", 300, file)
    with pytest.raises(ValueError, match="not for mt-bench"):
        load_examples("mt-bench", 1, file)
    with pytest.raises(ValueError, match="math500 need a file"):
        load_examples("math500", 1, None)


def test_the_hub(monkeypatch):
    """Rows come from the library; without a network one line names the option."""
    import datasets as library
    import huggingface_hub

    class Hub:
        def dataset_info(self, name, timeout):
            raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=r"openai/gsm8k .* --data FILE.jsonl, .*question, answer"):
        load_problems("gsm8k")
    with pytest.raises(ValueError, match=r"give the data with --few-shot-data FILE.jsonl"):
        load_examples("gsm8k", 2, None)

    def load(hub, config, split):
        assert (hub, config, split) == ("openai/gsm8k", "main", "test")
        return GSM8K

    monkeypatch.setattr(library, "load_dataset", load)
    assert [p.gold for p in load_problems("gsm8k", limit=3)] == ["0", "2", "4"]
    monkeypatch.setattr(library, "load_dataset", lambda *_, **__: [{"question": "x"}])
    with pytest.raises(ValueError, match="openai/gsm8k row 0: the field answer is missing"):
        datasets.load_problems("gsm8k")
