"""same-answers: one arithmetic gives plain decoding's answers, and another model's are seen."""

import json

from jflash.cli import main
from jflash.proof import same_answers
from jflash.proof.same_answers import Way, compared, ways
from jflash.records.decoding import Decoding
from jflash.system.embedded import EMBEDDED_PAIR
from tests.support.pairs import one_arithmetic, prompts, random_pair


def test_answers_are_counted_way_by_way(monkeypatch):
    pair, other = one_arithmetic(random_pair()), one_arithmetic(random_pair(seed=5))

    def with_another(*args):
        return ways(*args) | {"another target": Way(other, 2)}

    monkeypatch.setattr(same_answers, "ways", with_another)
    monkeypatch.setattr(same_answers, "GROUP", 2)
    monkeypatch.setattr(same_answers, "REFERENCE_BATCH", 3)
    decoding = Decoding(max_new_tokens=12)
    given = prompts(3, seed=3, low=4, high=20)
    found = list(compared(pair, given, 2, decoding, anchored=1))
    assert [sum(result["compared"].values()) for result in found] == [3, 6, 7, 9, 10, 13]
    last = found[-1]
    assert last["same"].pop("another target") == 0 and last["compared"].pop("another target") == 3
    ties = {"drafter, batch 2": 3, "random drafter, batch 2": 3, "drafter, batch 1": 3}
    assert last["same"] == last["compared"] == ties | {"plain, batch 1": 1}
    assert last["answers"] == 3 and last["seconds"].keys() >= {"compile", "plain, batch 3"}
    unlike = next(iter(compared(other, given, 2, decoding, anchored=1)))
    assert unlike["texts_sha256"] != last["texts_sha256"]


def test_answers_that_do_not_fit_are_refused_before_any_is_decoded(tmp_path, capsys):
    questions = tmp_path / "gsm8k.jsonl"
    lines = [json.dumps({"question": text, "answer": "#### 2"}) for text in ("1 + 1?", "x " * 2000)]
    questions.write_text("\n".join(lines))
    argv = [f"--{name}={EMBEDDED_PAIR / name}" for name in ("target", "drafter")]
    assert main.run("same-answers", [*argv, "--gsm8k", str(questions)]) == 2
    assert "same_answers.py: problem 1: " in capsys.readouterr().err
