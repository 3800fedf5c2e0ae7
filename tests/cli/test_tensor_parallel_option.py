"""--tensor-parallel: each command that reads a pair has it, and asks for as many devices."""

import json

import pytest

from jflash.cli.main import COMMANDS, make_parser, run
from jflash.cli.options.check_lossless import checks_of
from jflash.system.embedded import EMBEDDED_PAIR

TARGET, DRAFTER = (str(EMBEDDED_PAIR / name) for name in ("target", "drafter"))
READS = {"--target", "--written-by"}  # options that name a model to read


def options_of(name: str) -> set[str]:
    return {option for action in make_parser(name)._actions for option in action.option_strings}


def test_every_command_that_reads_a_model_has_it():
    without = [name for name in COMMANDS if READS & (options := options_of(name))
               and not {"--tensor-parallel", "--experts-over"} <= options]  # fmt: skip
    assert not without


@pytest.mark.parametrize("name", ["bench-steps", "check-logits", "check-program"])
def test_so_has_every_command_that_runs_shapes_alone(name):
    assert {"--shape", "--cases"} & (options := options_of(name)) and not READS & options
    assert {"--tensor-parallel", "--experts-over"} <= options


@pytest.fixture
def arguments(tmp_path) -> dict[str, list[str]]:
    """Of the commands that read files too; nothing is decoded."""
    prompts, questions = tmp_path / "prompts.jsonl", tmp_path / "gsm8k.jsonl"
    prompts.write_text(json.dumps({"prompt": "Why?"}))
    questions.write_text(json.dumps({"question": "1 + 1?", "answer": "2\n#### 2"}))
    pair = ["--target", TARGET, "--drafter", DRAFTER, "--gsm8k", str(questions)]
    made = ["--output", str(tmp_path / "made")]
    return {
        "generate": ["Why?"],
        "check-load": [],
        "evaluate": ["--dataset", "gsm8k", "--data", str(questions), *made],
        "make-prompts": ["--written-by", TARGET, *made],
        "train": ["--target", TARGET, "--data", str(prompts), *made],
        **dict.fromkeys(("same-answers", "bench-rows", "bench-serving"), pair),
    }


ASKED = ("generate", "check-load", "evaluate", "make-prompts", "train")


@pytest.mark.parametrize("name", [*ASKED, "same-answers", "bench-rows", "bench-serving"])
def test_a_command_asks_for_the_devices_before_weights_are_read(name, arguments, capsys):
    assert run(name, [*arguments[name], "--tensor-parallel", "64"]) == 2
    assert "tensor parallel over 64 devices: this host has" in capsys.readouterr().err
    assert run(name, [*arguments[name], "--experts-over", "devices"]) == 2
    assert "needs --tensor-parallel of 2 or more" in capsys.readouterr().err


def test_what_a_shape_does_on_one_device_alone(capsys):
    shape = ["--shape", "tiny", "--tensor-parallel", "2"]
    assert run("bench-rows", shape) == 2
    assert "--tensor-parallel is for a real pair, not for --shape" in capsys.readouterr().err


def test_devices_are_compared_if_their_number_is_given(capsys):
    """By itself, and never read beside another check, which would compare nothing."""
    parser = make_parser("check-lossless")
    asked = parser.parse_args(["--tensor-parallel", "1,2,4"])
    assert checks_of(asked) == ("devices",) and checks_of(parser.parse_args([])) == ("law",)
    assert run("check-lossless", ["--tensor-parallel", "1,2,4", "--checks", "ops"]) == 2
    why = "--tensor-parallel 1,2,4 is for --checks devices"
    assert why in capsys.readouterr().err
    assert run("check-lossless", ["--whole", "--checks", "ops"]) == 2
    assert "--whole is for --checks law" in capsys.readouterr().err
    assert run("check-lossless", ["--quantised", "int4", "--checks", "kept"]) == 2
    assert "--quantised int4 is for --checks devices" in capsys.readouterr().err
    assert run("check-lossless", ["--tensor-parallel", "1,3", "--pairs", "tiny-math"]) == 2
    assert "tensor parallel over 3 devices: this host has 1" in capsys.readouterr().err
    over = ["--tensor-parallel", "2", "--experts-over", "devices"]
    assert run("check-lossless", ["--quantised", "fp8", *over]) == 2
    assert "--quantised fp8: not for --experts-over devices" in capsys.readouterr().err
