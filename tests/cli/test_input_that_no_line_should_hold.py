"""Input that ends in one line: numbers and nests without bounds, hubs that break off, and what a
training would remove."""

import argparse
import json
import sys
from pathlib import Path

import huggingface_hub
import pytest

from jflash.cli.prompts import _line_sampling, read_prompts
from jflash.cli.train import check_outside
from jflash.io.checkpoint import open_checkpoint
from jflash.io.load import load_pair
from jflash.records.decoding import GREEDY
from jflash.system.json_lines import json_lines
from jflash.training.prompts import svamp_prompts


def test_a_number_that_no_float_holds():
    with pytest.raises(ValueError, match=r"^f:3 temperature is too large a number$"):
        _line_sampling({"temperature": 10**400}, "f:3 ", GREEDY)
    assert _line_sampling({"temperature": 2}, "f:3 ", GREEDY).temperature == 2.0


def test_a_mark_before_a_text_is_no_part_of_it(tmp_path, monkeypatch):
    """Some editors write one. The same character within a text stays."""
    text, inside = tmp_path / "prompt.txt", "a\ufeffb"
    text.write_bytes(f"\ufeff{inside}\r\n".encode())
    named = argparse.Namespace(prompts=None, prompt_ids=None, prompt_file=text)
    assert read_prompts(named)[0].text == inside
    piped = argparse.Namespace(prompts=None, prompt_ids=None, prompt_file=None, prompt="-")
    with text.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_prompts(piped)[0].text == inside
    text.write_bytes(b'\xef\xbb\xbf{"question": "a"}\r\n')
    assert json_lines(text) == [(f"{text}:1", {"question": "a"})]


def test_a_whole_json_file_is_told_what_its_lines_should_be(tmp_path):
    """It is JSON, so "line 1 is not JSON" would help nobody. A number that is none stays named."""
    file = tmp_path / "problems.json"
    file.write_text(json.dumps([{"question": "a"}, {"question": "b"}], indent=1))
    with pytest.raises(ValueError, match=f"^{file} is JSON as a whole: give an object a line$"):
        json_lines(file)
    for text in ('{"n": NaN}', '{"n": 1}\n{"n": NaN}\n'):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"^{file}:\d is not JSON: NaN is no JSON number$"):
            json_lines(file)


@pytest.mark.parametrize("source", ["", 5, None])
def test_what_names_no_checkpoint(source):
    """An empty one would be the folder of the process, such as from a variable that is not set."""
    with pytest.raises(ValueError, match=r"^the source .* file or .*hub id"):
        load_pair(source)


def test_stories_that_are_nested_too_deep(tmp_path):
    file = tmp_path / "svamp.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not SVAMP's JSON here: it is nested too deep"):
        svamp_prompts(file)


def test_a_hub_that_breaks_off(monkeypatch):
    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("peer closed\nthe connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ValueError, match="the hub's answer cannot be read") as refused:
        open_checkpoint("somebody/something")
    assert "\n" not in str(refused.value)


READ = "data", "eval_prompts", "target", "init_from"


@pytest.mark.parametrize("option", READ)
def test_what_a_training_reads_lies_in_no_folder_that_it_removes(tmp_path, option):
    work, given = (
        tmp_path / "o-work",
        dict.fromkeys(("data", "eval_prompts", "target", "init_from")),
    )
    (work / "in").mkdir(parents=True)
    check_outside(work, argparse.Namespace(**given | {option: tmp_path / "o" / "file"}))
    inside = Path(work / "in" / ".." / "file")
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} .* lies in .*o-work"):
        check_outside(work, argparse.Namespace(**given | {option: inside}))
