"""Bad input: one line on stderr naming the value, exit code 2, no traceback, nothing written."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jflash.cli import convert, generate
from jflash.cli.output_file import whole_file
from tests.small_checkpoints import Folders, edit_config, edit_tensors, make_pair

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Folders:
    return make_pair(tmp_path_factory.mktemp("made"))


@pytest.fixture
def pair(made, tmp_path) -> Folders:
    """A copy of its own, to be broken."""
    return Folders(*(Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in made))


def listing(folder: Path) -> list[tuple[str, bytes | None]]:
    files = sorted(folder.rglob("*"))
    return [(str(file), file.read_bytes() if file.is_file() else None) for file in files]


@pytest.fixture
def refused(capsys, caplog, tmp_path):
    """Runs a command that must refuse, and finds every one of `named` in its one line."""

    def call(argv: list[str], *named: str, main=generate.main) -> None:
        before = listing(tmp_path)
        capsys.readouterr()
        assert main(argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1 and captured.err.endswith("\n"), captured.err
        assert "Traceback" not in captured.err and not caplog.records
        for part in named:
            assert part in captured.err
        assert listing(tmp_path) == before

    return call


def decode(pair: Folders, *options: str, prompt: str | None = "hi") -> list[str]:
    models = ["--target", str(pair.target), "--drafter", str(pair.drafter)]
    return [*models, "--max-new-tokens", "16", *options, *([] if prompt is None else [prompt])]


def test_missing_folder(pair, refused):
    refused(decode(Folders(pair.target / "nowhere", pair.drafter)), "nowhere", "no such folder")
    refused(decode(Folders(pair.target, pair.drafter / "nowhere")), "nowhere", "no such folder")


def test_a_hub_id_without_a_network(pair, refused, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    named = ("nobody/no-such-model", "hub cannot be reached", "give its folder")
    refused(decode(Folders(Path("nobody/no-such-model"), pair.drafter)), *named)


def test_empty_folder(pair, refused, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(decode(Folders(tmp_path / "empty", pair.drafter)), "empty folder")


def test_a_file_instead_of_a_folder(pair, refused):
    refused(decode(Folders(pair.target / "config.json", pair.drafter)), "config.json is a file")


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_no_config(pair, refused, which):
    (getattr(pair, which) / "config.json").unlink()
    refused(decode(pair), which, "has no config.json")


def test_config_that_is_no_json(pair, refused):
    (pair.target / "config.json").write_text('{"architectures": [')
    refused(decode(pair), "config.json is not valid JSON")
    (pair.target / "config.json").write_text("[1]")
    refused(decode(pair), "expected a JSON object")


@pytest.mark.parametrize(
    "name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "Gemma4ForConditionalGeneration"]
)
def test_unsupported_architecture(pair, refused, name):
    edit_config(pair.target, architectures=[name])
    refused(decode(pair), name, "supported: Qwen3ForCausalLM")


def test_target_and_drafter_exchanged(pair, refused):
    refused(decode(Folders(pair.drafter, pair.target)), "DFlashDraftModel", "--drafter")
    refused(decode(Folders(pair.target, pair.target)), "unsupported drafter Qwen3ForCausalLM")


def test_dflash_2(pair, refused):
    edit_config(pair.drafter, architectures=["DFlash2DraftModel"])
    refused(decode(pair), "DFlash2DraftModel")


FEATURES = [
    ("target", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
    ("drafter", {"layer_types": ["sliding_attention"]}, "sliding_window"),
    ("target", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ("target", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
    ("target", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config (fp8)"),
    ("target", {"hidden_act": "gelu"}, "gelu"),
    ("target", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("target", {"hidden_size": "32"}, "hidden_size must be a whole number"),
    ("target", {"num_attention_heads": 0}, "num_attention_heads"),
    ("target", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
]


@pytest.mark.parametrize(("which", "change", "named"), FEATURES)
def test_unsupported_feature(pair, refused, which, change, named):
    edit_config(getattr(pair, which), **change)
    refused(decode(pair), named)


@pytest.mark.parametrize("size", [0, 7, 200, -100])
def test_truncated_safetensors(pair, refused, size):
    file = pair.target / "model.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    refused(decode(pair), "model.safetensors", "corrupt or truncated")


def test_corrupt_safetensors(pair, refused):
    (pair.drafter / "model.safetensors").write_bytes(b"\xff" * 4096)
    refused(decode(pair), "model.safetensors", "corrupt or truncated")


def test_no_weights(pair, refused):
    (pair.drafter / "model.safetensors").unlink()
    refused(decode(pair), str(pair.drafter), "holds no safetensors")


MISFITS = [
    ({"hidden_size": 64}, "hidden_size is 64 in the drafter, 32 in the target"),
    (
        {"num_target_layers": 5},
        "num_target_layers is 5 in the drafter, 2 in the target",
    ),
    ({"vocab_size": 301}, "vocab_size is 301 in the drafter, 300 in the target"),
    ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [0, 2]}}, "[0, 2]"),
    ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [-1, 1]}}, "[-1, 1]"),
    ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1, 1]}}, "[1, 1] repeat"),
    ({"dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 1]}}, "mask_token_id 300"),
    ({"dflash_config": {"mask_token_id": 299, "target_layer_ids": [1]}}, "fc.weight"),
    ({"dflash_config": {"target_layer_ids": [0, 1]}}, "lacks mask_token_id"),
    ({"num_target_layers": None}, "lacks num_target_layers"),
    ({"block_size": 1}, "block_size must be at least 2, got 1"),
]


@pytest.mark.parametrize(("change", "named"), MISFITS)
def test_drafter_that_does_not_fit(pair, refused, change, named):
    edit_config(pair.drafter, **change)
    refused(decode(pair), named)


def test_all_misfits_are_listed_together(pair, refused):
    edit_config(pair.drafter, hidden_size=64, vocab_size=301, num_target_layers=5)
    refused(decode(pair), "hidden_size is 64", "vocab_size is 301", "num_target_layers is 5")


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
    refused(decode(pair, *prompt, prompt=None), "the prompt alone is too long")


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


OPTIONS = [
    (["--prompt-ids", "1,x"], "1,x"),
    (["--max-new-tokens", "many"], "many"),
    (["--dtype", "float16"], "float16"),
    (["--block-size", "wide"], "neither a number nor auto"),
    (["--block-size", "auto", "--drafter", "none"], "--block-size auto without a drafter"),
    (["--block-size", "auto"], "no measured table fits"),
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
    (["--stop", ""], "--stop ''"),
    (["--unheard-of"], "--unheard-of"),
    (["--prompts", "x.jsonl"], "--prompts needs --output"),
    (["--output", "x.jsonl"], "--output needs --prompts"),
    (["--show-steps", "--json"], "--show-steps with --json"),
    (["--overwrite"], "--overwrite without --output"),
    (["--system", "be", "--no-chat-template"], "--system with --no-chat-template"),
    (["--reasoning", "on", "--no-chat-template"], "--reasoning on"),
    (["--target", "somewhere/else"], "needs its own --drafter"),
    (["--prompt-ids", "1", "text"], "not allowed with"),
    (["--prompt-ids", "1", "--prompt-file", "f"], "--prompt-file: not allowed with"),
]


@pytest.mark.parametrize(("argv", "named"), OPTIONS)
def test_options(refused, argv, named):
    refused(argv, named)


LINES = [
    ("{", "not valid JSON"),
    ("[1]", "expected an object"),
    ('{"text": "a"}', '"prompt" or "prompt_ids"'),
    ('{"prompt": "a", "prompt_ids": [1]}', '"prompt" or "prompt_ids"'),
    ('{"prompt": ""}', "is empty"),
    ('{"prompt": 3}', "found 3"),
    ('{"prompt_ids": []}', "is empty"),
    ('{"prompt_ids": [1, true]}', "found [1, True]"),
    ('{"prompt_ids": [1, 300]}', "token id 300"),
    ('{"prompt": "a", "score": NaN}', "NaN"),
    ('{"prompt": "a", "steps": 3}', "steps"),
    ('{"prompt": "\\ud800"}', "not valid UTF-8"),
    (json.dumps({"prompt": "a" * 400}), "the prompt alone is too long"),
]


@pytest.mark.parametrize(("line", "named"), LINES)
def test_a_broken_line_is_named_by_its_number(pair, refused, tmp_path, line, named):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    (pair.drafter / "model.safetensors").unlink()  # never reached
    argv = ["--prompts", str(source), "--output", str(tmp_path / "out.jsonl")]
    refused(decode(pair, *argv, prompt=None), "in.jsonl line 3: ", named)


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


def test_what_fails_halfway_leaves_the_old_output(pair, capsys, tmp_path, monkeypatch):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    output.write_text("mine")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate, "generate", full)
    argv = ["--prompts", str(source), "--output", str(output), "--overwrite"]
    before = listing(tmp_path)
    assert generate.main(decode(pair, *argv, prompt=None)) == 2
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


def test_no_tokenizer_for_a_text(pair, refused):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (pair.target / file).unlink()
    refused(decode(pair), "holds no tokenizer", "--prompt-ids")
    refused(decode(pair, "--prompt-ids", "1", "--stop", "x", prompt=None), "holds no tokenizer")


def test_broken_tokenizer_and_no_template(pair, refused):
    edited = pair.target / "tokenizer_config.json"
    whole = json.loads(edited.read_text())
    edited.write_text(json.dumps({k: v for k, v in whole.items() if k != "chat_template"}))
    refused(decode(pair), "no chat template", "--no-chat-template")
    (pair.target / "tokenizer.json").write_text('{"version":')
    refused(decode(pair), "tokenizer", "does not load")


def test_nothing_of_the_weights_is_read_before_the_request_is_checked(pair, refused):
    (pair.target / "model.safetensors").write_bytes(b"not reached")
    refused(decode(pair, "--max-new-tokens", "0"), "max_new_tokens")
    refused(decode(pair, "--max-new-tokens", "1000"), "positions")


# The same of convert_checkpoint.py


def convert_refused(refused, argv: list, *named: str) -> None:
    refused([str(value) for value in argv], *named, main=convert.main)


def test_convert_sources(pair, refused, tmp_path):
    destination = tmp_path / "converted"
    convert_refused(refused, [tmp_path / "nowhere", destination], "nowhere")
    edit_config(pair.target, architectures=["GptOssForCausalLM"])
    convert_refused(refused, [pair.target, destination], "GptOssForCausalLM")
    edit_tensors(pair.drafter, drop=("fc.weight",), more=np.zeros(3, np.float32))
    convert_refused(refused, [pair.drafter, destination], "missing: fc.weight", "unknown: more")
    os.truncate(pair.drafter / "model.safetensors", 1000)
    convert_refused(refused, [pair.drafter, destination], "corrupt or truncated")
    convert_refused(refused, [pair.drafter], "DST")


def test_convert_destinations(pair, refused, tmp_path):
    convert_refused(refused, [pair.drafter, pair.drafter], "exists already", "--overwrite")
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter").write_text("1")
    convert_refused(refused, [pair.drafter, other, "--overwrite"], "thesis exists and is no")
    below = pair.drafter / "config.json" / "dst"
    convert_refused(refused, [pair.drafter, below], "cannot write", "dst")
    convert_refused(refused, [pair.drafter, "/proc/dst"], "cannot write /proc/dst")
    convert_refused(refused, [pair.drafter, pair.drafter / "config.json", "--overwrite"], "no chec")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_convert_without_permission(pair, refused, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    convert_refused(refused, [pair.drafter, closed / "dst"], "closed/dst", "Permission denied")


def test_convert_with_no_space_left(pair, tmp_path):
    """A real full disc, where a test may make one; in a process of its own, as Orbax's threads
    outlive the error."""
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=16k", "none", str(small)]
    if not mount or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        argv = [str(pair.drafter), str(small / "a" / "dst")]
        command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py"), *argv]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, env=environment, text=True)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        assert "small/a/dst" in done.stderr and "No space left on device" in done.stderr
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_convert_that_fails_halfway_keeps_the_old_one(pair, refused, monkeypatch, tmp_path):
    def full(folder: Path, params: object) -> None:
        (folder / "orbax").mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jflash.io.convert.save_orbax", full)
    argv = [pair.target, pair.drafter, "--overwrite"]
    convert_refused(refused, argv, "cannot write", "No space left on device")
    convert_refused(refused, [pair.target, tmp_path / "new" / "dst"], "No space left on device")


def test_the_scripts_themselves(pair, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    weights = pair.drafter / "model.safetensors"
    os.truncate(weights, 100)
    for script, argv in [
        ("generate.py", decode(pair)),
        ("convert_checkpoint.py", [str(pair.drafter), str(tmp_path / "dst")]),
    ]:
        command = [sys.executable, str(ROOT / "scripts" / script), *argv]
        done = subprocess.run(command, capture_output=True, env=environment, text=True)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"{script}: ")
        assert str(weights) in done.stderr
    assert not (tmp_path / "dst").exists()
