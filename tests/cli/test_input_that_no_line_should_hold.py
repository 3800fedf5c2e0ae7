"""Input that ends in one line: numbers and nests without bounds, hubs that break off, and what a
training would remove."""

import argparse
from pathlib import Path

import huggingface_hub
import pytest

from jflash.cli.prompts import _line_sampling
from jflash.cli.train import check_outside
from jflash.decoding import GREEDY
from jflash.io.checkpoint import open_checkpoint
from jflash.training.prompts import svamp_prompts


def test_a_number_that_no_float_holds():
    with pytest.raises(ValueError, match=r"^f:3 temperature is too large a number$"):
        _line_sampling({"temperature": 10**400}, "f:3 ", GREEDY)
    assert _line_sampling({"temperature": 2}, "f:3 ", GREEDY).temperature == 2.0


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
