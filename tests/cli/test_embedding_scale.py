"""A drafter whose file does not say its embeddings' scale: its target's is taken, and said."""

import json
import shutil
from pathlib import Path

import pytest

from jflash.cli.command import Parser
from jflash.cli.generate import configured, loaded
from jflash.cli.options.generate import declare

CASES = Path(__file__).parents[1] / "reference" / "cases"


def notes(target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> str:
    parser = Parser("generate", "")
    declare(parser)
    argv = ["--target", str(target), "--drafter", str(drafter), "a"]
    pair = loaded(configured(parser.parse_args([*argv, "--dtype", "float32"]), 1), False)
    assert pair.models.drafter is not None
    return capsys.readouterr().err


@pytest.mark.parametrize(("case", "said"), [("pair13", True), ("pair00", False)])
def test_a_line_says_what_the_target_gives(case, said, tmp_path, capsys):
    target, drafter = CASES / case / "target", tmp_path / "drafter"
    shutil.copytree(CASES / case / "drafter", drafter)
    file = drafter / "config.json"
    config = json.loads(file.read_text())
    config.get("dflash_config", {}).pop("input_embedding_scale", None)
    file.write_text(json.dumps(config))
    line = "embeddings are multiplied by 5.65685, as its target's are: its config does not say"
    assert (line in notes(target, drafter, capsys)) == said
    assert "multiplied" not in notes(target, CASES / case / "drafter", capsys)
