"""The pair in checkpoints/: README's example, and the promise kept on real text.

Its default prompt is decoded in tests/cli/test_wheel.py.
"""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import jflash
from jflash import encode_prompt, generate, load_pair, load_tokenizer, stop_token_ids, stream
from jflash.io import random_drafter
from jflash.pair import Params
from tiny_pair.word_problems import extract_result, problems

ROOT = Path(__file__).parents[2]
TINY = ROOT / "checkpoints" / "tiny-math"
REFERENCE = Path(__file__).parents[1] / "golden" / "tiny_math_reference.json"
CAPACITY = 256  # of what is decoded at batch 1, README's prompt too: then it is one program


@pytest.fixture(scope="module")
def pair():
    return load_pair(TINY / "target", TINY / "drafter", dtype="float32")


@pytest.mark.parametrize("part", [0, *(pytest.param(x, marks=pytest.mark.long) for x in (1, 2))])
def test_the_reference_decodes_it_alike(pair, part):
    """dflash 0.1.0 (record_pair.py) gives these tokens in these steps, in torch and float32."""
    record = json.loads(REFERENCE.read_text())
    stops = stop_token_ids(TINY / "target")
    assert len(record["cases"]) == 24
    for case in record["cases"][part::3]:
        got = generate(
            pair, [case["prompt_ids"]], max_new_tokens=record["max_new_tokens"],
            stop_token_ids=stops, capacity=CAPACITY,
        )[0]  # fmt: skip
        assert got.token_ids == case["output_ids"]
        assert got.acceptance_lengths == case["acceptance_lengths"]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_readme_example_runs(capsys, monkeypatch, whole):
    """In float32, whose programs are there, and the engine's for what the example asks; or as it
    is printed."""
    monkeypatch.chdir(ROOT)
    if not whole:
        monkeypatch.setattr(jflash, "load_pair", functools.partial(load_pair, dtype="float32"))
        monkeypatch.setattr(jflash, "Engine", functools.partial(jflash.Engine, kinds=("drawn",)))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "#### 21" in printed
    rollouts = [
        [json.loads(f"[{part}]") for part in found]
        for found in re.findall(r"^\[(.+)\] \[(.+)\]$", printed, re.M)
    ]
    assert len(rollouts) == 4
    for ids, logprobs in rollouts:
        assert len(ids) == len(logprobs) and all(-100 < score <= 0 for score in logprobs)


def test_trained_random_and_no_drafts_say_the_same(pair):
    """On real prompts: bits of the drafter's weights never reach the text.

    Those that take a step for a token say its first 16, in the same program.
    """
    tokenizer = load_tokenizer(TINY / "target")
    stops = stop_token_ids(TINY / "target", tokenizer)
    asked = list(problems("eval", 99, 2)) + list(problems("held_out", 99, 1))
    prompts = [encode_prompt(tokenizer, problem.question) for problem in asked]
    how = {"max_new_tokens": 160, "stop_token_ids": stops, "capacity": CAPACITY}

    def each(pair, **how):
        return [generate(pair, [prompt], **how)[0] for prompt in prompts]

    trained = each(pair, **how)
    _, weights = random_drafter(TINY / "drafter", 5, "float32")
    random = replace(pair, params=Params(pair.params.target, weights))
    lengths = [n for g in trained for n in g.acceptance_lengths]
    assert sum(lengths) / len(lengths) > 4
    soon = how | {"max_new_tokens": 16}
    for other in (each(random, **soon), each(pair, oracle=True, **soon)):
        assert [g.token_ids for g in other] == [g.token_ids[:16] for g in trained]
    streamed = list(stream(pair, prompts[0], **how))[-1].generation
    assert streamed.token_ids == trained[0].token_ids
    right = [extract_result(tokenizer.decode(g.token_ids[:-1])) for g in trained[:2]]
    assert right == [problem.result for problem in asked[:2]]


def test_checkpoints_stay_small():
    size = sum(f.stat().st_size for f in TINY.rglob("*") if f.is_file())
    assert size <= 18e6
