"""What a command imports before it works: help and refusals wait for nothing slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jflash.cli.command import Parser, run_command
from jflash.cli.main import COMMANDS, make_parser
from jflash.system.sources import same_paths

ROOT = Path(__file__).parents[2]
SCRIPTS = [make_parser(command).prog for command in COMMANDS]  # one of each
SLOW = {
    *("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "transformers", "tokenizers"),
    *("huggingface_hub", "safetensors", "matplotlib", "datasets", "math_verify", "gguf"),
    *("starlette", "uvicorn", "msgspec", "prometheus_client", "httpx"),
    *("jaxtyping", "jinja2", "tqdm", "scipy", "importlib.metadata"),
}
# Calls a function with the arguments of each line of standard input, and prints as a line what came
# of it and what is imported of SLOW: a process that has imported nothing slow is as good as new.
EACH = f"""
import contextlib, io, json, runpy, sys
def main(*argv):
    from jflash.cli.main import main
    return main(argv)
def without(module, *argv):
    sys.modules[module] = None
    try:
        return main(*argv)
    finally:
        del sys.modules[module]
def script(*argv):
    forget()
    sys.path[:], sys.argv = [{str(ROOT / "scripts")!r}, *path], [*argv]
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        print(sys.modules["jflash.cli.main"].__file__, file=sys.stderr)
def forget():
    for name in [name for name in sys.modules if name.split(".")[0] in ("jflash", "tree")]:
        del sys.modules[name]
def each(call):
    for line in sys.stdin:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = call(*json.loads(line))
            except SystemExit as end:
                code = end.code
        slow = sorted({SLOW!r} & set(sys.modules))
        print(json.dumps([code, out.getvalue(), err.getvalue(), slow]))
path = sys.path[:]
"""


def python(code: str, given: str = "", **options) -> subprocess.CompletedProcess:
    """Runs code in a process that has not imported anything."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", EACH + code]
    options = {"env": environment} | options
    return subprocess.run(command, capture_output=True, text=True, input=given, **options)


def outcomes(call: str, argvs: list[list[str]], **options) -> list[tuple[int, str, str, list[str]]]:
    """Of each call: exit code, both outputs, and slow imports."""
    done = python(f"each({call})", "\n".join(map(json.dumps, argvs)), **options)
    assert done.returncode == 0, done.stderr
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(argvs)
    return found


def test_help_says_what_an_option_has_by_default():
    train, prompts = (make_parser(name).format_help() for name in ("train", "make-prompts"))
    said = " ".join(train.split())
    for text in (
        "--steps STEPS default 20000",
        "of an answer; default 512",
        "loss tv; default 0.1",
    ):
        assert text in said
    assert "at a time; default 64" in said and said.count("each with the whole target") == 2
    assert "user turns that it writes; default 1000" in " ".join(prompts.split())
    for name in COMMANDS:
        assert "==SUPPRESS==" not in make_parser(name).format_help()


def test_help_imports_nothing_slow():
    calls = [["--help"], *([command, "--help"] for command in COMMANDS)]
    (code, whole, _, slow), *each = outcomes("main", calls)
    assert code == 0 and not slow and all(f"\n  {name} " in whole for name in COMMANDS)
    for command, (code, out, _, imported) in zip(COMMANDS, each, strict=True):
        assert (code, imported) == (0, []), command
        assert out.startswith(f"usage: jflash {command} "), out


REFUSALS = [
    ([], "COMMAND"),
    (["speak"], "'speak'"),
    (["--loud"], "COMMAND"),
    (["generate", "--loud"], "--loud"),
    (["generate", "--temperature", "-1"], "--temperature -1"),
    (["generate", "--drafter", "random:x"], "random:x"),
    (["serve", "--port", "70000"], "--port 70000"),
    (["serve", "--steps-per-call", "0"], "--steps-per-call 0"),
    (["soak", "--minutes", "0"], "--minutes 0"),
    (["evaluate", "--dataset", "odd"], "'odd'"),
    (["eval-gsm8k", "--batch", "0"], "--batch 0"),
    (["benchmark", "--shape", "huge"], "'huge'"),
    (["bench-kernels", "--rounds", "0"], "--rounds 0"),
    (["bench-devices", "--cases", "tiny"], "'tiny'"),
    (["check-lossless", "--pairs", "gpt"], "'gpt'"),
    (["check-program", "--capacity", "3"], "--capacity 3"),
    (["check-logits", "--layers", "0"], "--layers 0"),
    (["convert", "one"], "DST"),
    (["make-prompts", "--output", "x"], "no source of prompts"),
    (["train", "--target", "x", "--data", "x", "--output", "y", "--loss", "l1"], "'l1'"),
]


def test_a_refusal_is_one_line_and_imports_nothing_slow():
    found = outcomes("main", [argv for argv, _ in REFUSALS])
    for (argv, named), (code, out, err, imported) in zip(REFUSALS, found, strict=True):
        assert (code, out, imported) == (2, "", []), argv
        [line] = err.splitlines()
        assert line.startswith("jflash") and named in line


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_ends_no_command(monkeypatch, name):
    """Such as that of a service, which writes its results to files."""
    monkeypatch.setattr(sys, name, None)
    done: list[bool] = []

    def body(_: object) -> None:
        stream = getattr(sys, name)
        print("a line", file=stream)
        done.append(stream.isatty())

    assert run_command(Parser("a command", "It prints."), body, []) == 0
    assert done == [False]


def test_a_script_is_the_command_of_its_own_tree(tmp_path):
    """Without PYTHONPATH and whatever is installed, with the options of the command."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    folder = ROOT / "scripts"
    given = {"env": environment, "cwd": tmp_path}
    first = [sys.executable, str(folder / "generate.py"), "--help"]
    done = subprocess.run(first, capture_output=True, text=True, **given)
    assert done.returncode == 0 and done.stdout.startswith("usage: generate.py ")
    calls = [[str(folder / script), "--help"] for script in SCRIPTS]
    found = outcomes("script", calls, **given)
    for script, (code, out, err, _) in zip(SCRIPTS, found, strict=True):
        assert code == 0 and out.startswith(f"usage: {script} ")
        assert err == f"{ROOT / 'jflash' / 'cli' / 'main.py'}\n"


@pytest.mark.parametrize(("named", "why"), [("cuda", "no such device is here"), ("gpus", "'gpus'")])
def test_platforms_that_are_not_here_are_a_line(named, why):
    """Such as those of a container's environment, whose GPU it was not given."""
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": named}
    command = [sys.executable, "-m", "jflash", "generate", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"jflash generate: JAX_PLATFORMS={named}: ") and why in line


def test_python_m_is_the_console_command():
    def module(*argv: str) -> tuple[int, str, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-P", "-m", "jflash", *argv]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout, done.stderr

    calls = [["--help"], ["generate", "--loud"]]
    for argv, (code, out, err, _) in zip(calls, outcomes("main", calls), strict=True):
        assert module(*argv) == (code, out, err)


def test_another_process_imports_the_same_jflash(tmp_path, monkeypatch):
    """Ours is found by the folder that we are in, and the other's folder holds another one."""
    (tmp_path / "jflash.py").write_text("")
    monkeypatch.chdir(ROOT)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [""])
        environment = os.environ | same_paths()
    command = [sys.executable, "-P", "-c", "import jflash; print(jflash.__file__)"]
    given = {"cwd": tmp_path, "env": environment, "text": True}
    assert subprocess.check_output(command, **given) == f"{ROOT / 'jflash' / '__init__.py'}\n"


def test_the_public_names_come_when_they_are_used():
    light = "import jflash\nassert 'generate' in dir(jflash) and len(jflash.__all__) == 15\n"
    light += f"assert not {SLOW!r} & set(sys.modules)\n"
    # A module and a function are called jflash.generate: the function is the public one.
    forms = ("import jflash", "import jflash.generate", "from jflash.generate import Pair")
    public = "from jflash import generate, load_pair\nassert callable(generate)\n"
    public += "import jflash\nassert callable(jflash.generate)\n"
    code = light + "".join(f"forget()\n{first}\n{public}" for first in forms)
    done = python(code + "from jflash import nothing")
    assert done.stderr.splitlines()[-1].startswith("ImportError: cannot import name 'nothing'")


MISSING = [
    ("gguf", "gguf", "generate hi --target m.gguf --drafter none"),
    ("math_verify", "eval", "eval-gsm8k --data none.jsonl"),
    ("matplotlib", "eval", "evaluate --dataset mt-bench --data none.jsonl"),
    ("datasets", "eval", "eval-gsm8k"),
    ("uvicorn", "serve", "serve"),
    ("optax", "train", "train --target x --data data --output new"),
]


def test_what_is_not_installed_is_named_by_its_extra(tmp_path):
    (tmp_path / "data").write_text("")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    calls = [[module, *argv.split()] for module, _, argv in MISSING]
    found = outcomes("without", calls, cwd=tmp_path)
    for (module, extra, _), (code, out, err, _) in zip(MISSING, found, strict=True):
        assert (code, out) == (2, "")
        [line] = err.splitlines()
        assert line.endswith(f"{module} is not installed: pip install 'jflash[{extra}]'")
