"""Requests that generate.py cannot serve: one line on stderr naming the value, exit code 2."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jflash.cli import generate, main
from jflash.system.lines import whole_file
from tests.support.refusals import decode, listing
from tests.support.small_checkpoints import Folders, edit_config, make_pair

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pair(tmp_path) -> Folders:
    return make_pair(tmp_path)


@pytest.mark.parametrize("width", ["5", "16", "1", "0", "-3"])
def test_block_size(pair, refused, width):
    refused(decode(pair, "--block-size", width), f"block size {width} must be within 2 … 4")


def test_block_size_without_a_drafter(pair, refused):
    argv = ["hi", "--target", str(pair.target), "--drafter", "none", "--block-size", "0"]
    refused(argv, "block size 0")


@pytest.mark.parametrize("count", ["0", "-1"])
def test_max_new_tokens(pair, refused, count):
    refused(
        decode(pair, "--max-new-tokens", count), f"max_new_tokens must be at least 1, got {count}"
    )


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_prompt(pair, refused, text, tmp_path):
    refused(decode(pair, prompt=text), "prompt", "empty")
    file = tmp_path / "empty.txt"
    file.write_text(text)
    refused(decode(pair, "--prompt-file", str(file), prompt=None), "empty.txt", "is empty")
    refused(decode(pair, "--prompt-ids", "", prompt=None), "is empty")


def test_prompt_and_new_tokens_over_the_positions(pair, refused):
    prompt = ["--prompt-ids", ",".join(["1"] * 100)]
    named = ("100 prompt tokens + 141 new tokens", "240 positions", "max_new_tokens 140 fits")
    refused(decode(pair, *prompt, "--max-new-tokens", "141", prompt=None), *named)
    prompt = ["--prompt-ids", ",".join(["1"] * 240)]
    refused(decode(pair, *prompt, prompt=None), "the prompt itself is too long")


def test_the_smaller_of_both_models_positions_counts(pair, refused):
    edit_config(pair.drafter, max_position_embeddings=50)
    refused(decode(pair, "--max-new-tokens", "99"), "50 positions")


@pytest.mark.parametrize("ids", ["1,300", "-1", "=-1,2", "1,99999999999"])
def test_token_ids_outside_the_vocabulary(pair, refused, ids):
    value = ids.removeprefix("=")
    bad = next(i for i in value.split(",") if not 0 <= int(i) < 300)
    for option in ("--prompt-ids", "--stop-token-ids"):
        given = [f"{option}={value}"] if ids.startswith("=") else [option, value]
        rest = decode(pair, *given, prompt=None if option == "--prompt-ids" else "hi")
        refused(rest, f"token id {bad}", "vocabulary of 300")


def test_prompt_file(pair, refused, tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("é".encode("latin-1"))
    refused(decode(pair, "--prompt-file", str(file), prompt=None), "latin.txt is not UTF-8")
    missing = str(tmp_path / "missing.txt")
    refused(decode(pair, "--prompt-file", missing, prompt=None), "missing.txt cannot be read")
    refused(decode(pair, "--prompt-file", str(tmp_path), prompt=None), "directory")
    refused(decode(pair, prompt="\udce9"), "not valid UTF-8")
    refused(decode(pair, "--system", "\udce9"), "the text is not valid UTF-8")


OPTIONS = [
    (["--prompt-ids", "1,x"], "1,x"),
    (["--max-new-tokens", "many"], "many"),
    (["--dtype", "float16"], "float16"),
    (["--block-size", "wide"], "wide"),
    (["--verify-rows", "many"], "neither a number nor auto"),
    (["--verify-rows", "9", "--drafter", "none"], "--verify-rows 9 without a drafter"),
    (["--drafter-dtype", "float8", "--drafter", "none"], "float8 without a drafter"),
    (["--draft-rule", "greedy", "--drafter", "none"], "--draft-rule greedy without a drafter"),
    (["--oracle", "--drafter", "none"], "--oracle without a drafter"),
    (["--experts-over", "devices"], "--experts-over devices needs --tensor-parallel of 2 or more"),
    (["--verify-rows", "0"], "0 rows to verify for 1 sequences: each needs one"),
    (
        ["--attention-backend", "mosaic_gpu", "--dtype", "bfloat16"],
        "compute capability 9.x, and this is a cpu device",
    ),
    (["--attention-backend", "flash"], "no backend 'flash'"),
    (["--reasoning", "maybe"], "maybe"),
    (["--temperature", "-1"], "-1"),
    (["--temperature", "nan"], "nan"),
    (["--seed", "-1"], "-1"),
    (["--seed", str(2**32)], str(2**32)),
    (["--drafter", "random:x"], "random:x"),
    (["--drafter", "random:"], "random:"),
    (["--batch-size", "0"], "--batch-size 0"),
    (["--batch-size", "4"], "--batch-size 4 without --prompts"),
    (["--stop", ""], "--stop ''"),
    (["--unheard-of"], "--unheard-of"),
    (["--prompts", "x.jsonl"], "--prompts needs --output"),
    (["--output", "x.jsonl"], "--output needs --prompts"),
    (["--show-steps", "--json"], "--show-steps with --json"),
    (["--overwrite"], "--overwrite without --output"),
    (["--system", "be", "--no-chat-template"], "--system with --no-chat-template"),
    (["--reasoning", "on", "--no-chat-template"], "--reasoning on"),
    (["--target", "somewhere/else"], "somewhere/else needs --drafter"),
    (["--prompt-ids", "1", "text"], "not allowed with"),
    (["--prompt-ids", "1", "--prompt-file", "f"], "--prompt-file: not allowed with"),
]


@pytest.mark.parametrize(("argv", "named"), OPTIONS)
def test_options(refused, argv, named):
    refused(argv, named)


@pytest.mark.parametrize("command", main.COMMANDS)
def test_an_empty_path_is_not_the_folder_that_we_are_in(command):
    parser = main.make_parser(command)
    for action in parser._actions:
        if action.type is Path:
            first = action.option_strings[:1] or ["SRC"]
            count = action.nargs if isinstance(action.nargs, int) else 1
            with pytest.raises(ValueError, match="'' names no file and no folder"):
                parser.parse_args([*first, *[""] * count])


def test_an_empty_output_writes_nothing(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    argv = ["--dataset", "gsm8k", "--output", ""]
    refused(argv, "argument --output: '' names no file and no folder", command="evaluate")


def test_a_link_that_leads_to_itself_is_named(tmp_path, refused):
    """Its path cannot be resolved, which was a RuntimeError of pathlib's."""
    (tmp_path / "loop").symlink_to("loop")
    for place in ("loop", "loop/x"):
        argv = ["--target", "t", "--data", "d", "--output", str(tmp_path / place)]
        refused(argv, f"{place}' is a link that leads to itself: give another", command="train")


LINES = [
    ("{", "is not JSON"),
    ("[1]", "is not a JSON object"),
    ('{"text": "a"}', '"prompt" or "prompt_ids"'),
    ('{"prompt": "a", "prompt_ids": [1]}', '"prompt" or "prompt_ids"'),
    ('{"prompt": ""}', "is empty"),
    ('{"prompt": 3}', "not 3"),
    ('{"prompt_ids": []}', "is empty"),
    ('{"prompt_ids": [1, true]}', "not [1, True]"),
    ('{"prompt_ids": [1, 300]}', "token id 300"),
    ('{"prompt": "a", "score": NaN}', "NaN"),
    ('{"prompt": "a", "score": 1e999}', "1e999 is too large a number"),
    ('{"prompt": "a", "steps": 3}', "steps"),
    ('{"prompt": "\\ud800"}', "not valid UTF-8"),
    ('{"prompt": ' + "[" * 100_000, "nested too deep"),
    (json.dumps({"prompt": "a" * 400}), "the prompt itself is too long"),
]


@pytest.mark.parametrize(("line", "named"), LINES)
def test_a_broken_line_is_named_by_its_number(pair, refused, tmp_path, line, named):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    (pair.drafter / "model.safetensors").unlink()  # never reached
    argv = ["--prompts", str(source), "--output", str(tmp_path / "out.jsonl")]
    refused(decode(pair, *argv, prompt=None), "in.jsonl:3", named)


def test_prompts_without_a_prompt(pair, refused, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("\n")
    argv = ["--prompts", str(source), "--output", str(tmp_path / "out.jsonl")]
    refused(decode(pair, *argv, prompt=None), "in.jsonl holds no prompts")


def test_outputs_that_cannot_be_written(pair, refused, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    output.write_text("mine")

    def argv(path: Path, *more: str) -> list[str]:
        return decode(pair, "--prompts", str(source), "--output", str(path), *more, prompt=None)

    refused(argv(output), "out.jsonl exists already", "--overwrite")
    refused(argv(tmp_path / "no" / "out.jsonl"), "out.jsonl", "No such file or directory")
    refused(argv(output / "out.jsonl"), "Not a directory")
    refused(argv(tmp_path, "--overwrite"), "is no file")
    refused(argv(Path("/dev/null"), "--overwrite"), "is no file")
    (tmp_path / "link.jsonl").symlink_to(source)
    refused(argv(tmp_path / "link.jsonl", "--overwrite"), "would replace", "in.jsonl, which")


def test_what_fails_halfway_leaves_the_old_output(pair, capsys, tmp_path, monkeypatch):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    output.write_text("mine")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate, "generate", full)
    argv = ["--prompts", str(source), "--output", str(output), "--overwrite"]
    before = listing(tmp_path)
    assert main.run("generate", decode(pair, *argv, prompt=None)) == 2
    assert capsys.readouterr().err.endswith("No space left on device\n")  # after the progress bar
    assert listing(tmp_path) == before


def test_a_full_disc_names_the_output(tmp_path):
    output = tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ValueError, match=r"out\.jsonl: "), whole_file(output, False) as write:
            write("x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_the_weights_is_read_before_the_request_is_checked(pair, refused):
    (pair.target / "model.safetensors").write_bytes(b"not reached")
    refused(decode(pair, "--max-new-tokens", "0"), "max_new_tokens")
    refused(decode(pair, "--max-new-tokens", "1000"), "positions")


def test_the_script_itself(pair):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    weights = pair.drafter / "model.safetensors"
    os.truncate(weights, 100)
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), *decode(pair)]
    done = subprocess.run(command, capture_output=True, env=environment, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("generate.py: ")
    assert str(weights) in done.stderr
