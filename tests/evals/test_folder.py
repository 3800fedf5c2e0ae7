"""The folder of a run, and of another to compare with: a damaged file of that one is named."""

import json

import pytest

from jflash.evals.folder import ALIKE, finished_answers, open_folder

SETTINGS = dict.fromkeys(ALIKE, 0) | {"draft_rule": "greedy"}


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
