"""The folder of a run, and of another to compare with: a damaged file of that one is named."""

import json

import pytest

from jflash.evals.folder import (
    ALIKE,
    check_asked,
    finished_answers,
    open_folder,
    read_answers,
)

SETTINGS = dict.fromkeys(ALIKE, 0) | {"draft_rule": "greedy"}
ANSWER = {
    **{"index": 0, "turn": 0, "check": {"rule": "boxed", "correct": True}, "text": "7"},
    **{"prompt_tokens": 3, "token_ids": [7, 2], "acceptance_lengths": [1]},
    **{"finish_reason": "stop", "seconds": {"compile": 0.0, "prefill": 0, "decode": 0.5}},
}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("run.json", "x", "run.json is not valid JSON"),
        ("run.json", "[]", "run.json is no JSON object"),
        ("summary.json", "", "summary.json is not valid JSON"),
        ("summary.json", "[]", "summary.json is no JSON object"),
        ("summary.json", "{}", "summary.json does not say how many answers there are"),
        ("summary.json", '{"acceptance": 3}', "summary.json does not say how many answers"),
    ],
)
def test_a_damaged_file_of_the_run_to_compare_with_is_named(tmp_path, name, text, why):
    (tmp_path / "run.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "summary.json").write_text('{"acceptance": {"all": {"prompts": 0}}}')
    assert finished_answers(tmp_path, SETTINGS) == []
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=why):
        finished_answers(tmp_path, SETTINGS)


def test_a_link_to_a_folder_to_come_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "far" / "run")
    with open_folder(tmp_path / "link", SETTINGS, overwrite=False):
        assert json.loads((tmp_path / "far/run/run.json").read_text()) == SETTINGS


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        *(({name: None}, name) for name in ANSWER if name != "check"),
        ({"index": "0"}, "index"),
        ({"token_ids": []}, "token_ids"),
        ({"acceptance_lengths": [1, "x"]}, "acceptance_lengths"),
        ({"check": 3}, "check"),
        ({"check": {"correct": True}}, "check"),
        ({"token_ids": [10**12]}, "token_ids"),
        ({"seconds": {"compile": 0, "decode": 0}}, "seconds of prefill"),
        ({"seconds": {"compile": 0, "decode": float("nan"), "prefill": 0}}, "seconds of decode"),
        ({"seconds": ANSWER["seconds"] | {"more": 1}}, "seconds of more"),
    ],
)
def test_a_line_that_lacks_what_a_summary_reads_is_named(tmp_path, change, lacking):
    """It was a KeyError, after the models were loaded and the other answers made."""
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(ANSWER) + "\n")
    assert read_answers(file) == [ANSWER]
    with file.open("a") as more:
        more.write(json.dumps(ANSWER | {"index": 1, "check": None} | change) + "\n")
    with pytest.raises(ValueError, match=f"line 2 is no answer, {lacking} is missing or of"):
        read_answers(file)
    without = {name: value for name, value in ANSWER.items() if name not in change}
    file.write_text(json.dumps(without) + "\n")
    with pytest.raises(ValueError, match=f"line 1 is no answer, {next(iter(change))} is missing"):
        read_answers(file)


def test_an_answer_to_what_was_not_asked_is_named(tmp_path):
    """Such as of another run's file: it was counted, and wrong."""
    lines = [ANSWER, ANSWER | {"index": 7}, ANSWER | {"turn": 1}]
    for name in ("answers", "baseline"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(ANSWER) + "\n")
        check_asked(tmp_path, {0: 1, 3: 2})
        for other, turns in ((lines[1], {0: 1, 3: 2}), (lines[2], {0: 1})):
            file.write_text(json.dumps(ANSWER) + "\n" + json.dumps(other) + "\n")
            told = f"{name}.jsonl has an answer to problem {other['index']}, turn {other['turn']},"
            with pytest.raises(ValueError, match=f"{told} which this run does not ask"):
                check_asked(tmp_path, turns)
        file.unlink()
