"""What a command imports before it works: help and refusals wait for nothing slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jflash.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *("bench_kernels", "benchmark", "check_lossless", "check_logits", "check_program"),
    *("chat", "convert_checkpoint", "eval_gsm8k", "evaluate", "generate", "make_prompts"),
    *("serve", "soak", "train_drafter"),
]
SLOW = {
    *("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "transformers", "tokenizers"),
    *("huggingface_hub", "safetensors", "matplotlib", "datasets", "math_verify", "gguf"),
    *("starlette", "uvicorn", "msgspec", "prometheus_client", "httpx"),
    *("jaxtyping", "jinja2", "tqdm", "scipy", "importlib.metadata"),
}
# Runs code, then prints on the last line of stderr which of SLOW were imported.
LOOK = """
import json, sys
def look():
    print(json.dumps(sorted({slow!r} & set(sys.modules))), file=sys.stderr)
import atexit
atexit.register(look)
"""


def python(code: str, *argv: str, root: Path = ROOT) -> tuple[subprocess.CompletedProcess, list]:
    """Runs code in a process that has not imported anything; what it imported of SLOW."""
    command = [sys.executable, "-P", "-c", LOOK.format(slow=SLOW) + code, *argv]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done, json.loads(done.stderr.splitlines()[-1])


MAIN = "from jflash.cli.main import main\nsys.exit(main())"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command):
    done, imported = python(MAIN, command, "--help")
    assert done.returncode == 0 and imported == []
    assert done.stdout.startswith(f"usage: jflash {command} ")


def test_help_of_all_names_every_command():
    done, imported = python(MAIN, "--help")
    assert done.returncode == 0 and imported == []
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["speak"], "'speak'"),
        (["--loud"], "COMMAND"),
        (["generate", "--loud"], "--loud"),
        (["generate", "--temperature", "-1"], "--temperature -1"),
        (["generate", "--drafter", "random:x"], "random:x"),
        (["serve", "--port", "70000"], "--port 70000"),
        (["soak", "--minutes", "0"], "--minutes 0"),
        (["evaluate", "--dataset", "odd"], "'odd'"),
        (["eval-gsm8k", "--batch", "0"], "--batch 0"),
        (["benchmark", "--shape", "huge"], "'huge'"),
        (["bench-kernels", "--rounds", "0"], "--rounds 0"),
        (["check-lossless", "--pairs", "gpt"], "'gpt'"),
        (["check-program", "--capacity", "3"], "--capacity 3"),
        (["check-logits", "--layers", "0"], "--layers 0"),
        (["convert", "one"], "DST"),
        (["make-prompts", "--output", "x"], "no source of prompts"),
        (["train", "--target", "x", "--data", "x", "--output", "y", "--loss", "l1"], "'l1'"),
    ],
)
def test_a_refusal_is_one_line_and_imports_nothing_slow(argv, named):
    done, imported = python(MAIN, *argv)
    assert done.returncode == 2 and done.stdout == "" and imported == []
    [line, _] = done.stderr.splitlines()
    assert line.startswith("jflash") and named in line


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_the_command_of_its_own_tree(script, tmp_path):
    """Without PYTHONPATH and whatever is installed, with the options of the command."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-v", str(ROOT / "scripts" / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {script}.py ")
    assert str(ROOT / "jflash" / "cli" / "main.py") in done.stderr


def test_the_public_names_come_when_they_are_used():
    code = "import jflash\nassert 'generate' in dir(jflash) and len(jflash.__all__) == 11"
    done, imported = python(code)
    assert done.returncode == 0 and imported == []
    # A module and a function are called jflash.generate: the function is the public one.
    for first in ("import jflash", "import jflash.generate", "from jflash.generate import Pair"):
        code = f"{first}\nfrom jflash import generate, load_pair\nassert callable(generate)\n"
        done, _ = python(code + "import jflash\nassert callable(jflash.generate)")
        assert done.returncode == 0, done.stderr
    done, _ = python("from jflash import nothing")
    assert "cannot import name 'nothing'" in done.stderr


@pytest.mark.parametrize(
    ("module", "extra", "argv"),
    [
        ("gguf", "gguf", "generate hi --target m.gguf --drafter none"),
        ("math_verify", "eval", "eval-gsm8k --data none.jsonl"),
        ("matplotlib", "eval", "evaluate --dataset mt-bench --data none.jsonl"),
        ("datasets", "eval", "eval-gsm8k"),
        ("uvicorn", "serve", "serve"),
        ("optax", "train", "train --target x --data data --output new"),
    ],
)
def test_what_is_not_installed_is_named_by_its_extra(module, extra, argv, tmp_path):
    (tmp_path / "data").write_text("")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    code = f"import sys\nsys.modules[{module!r}] = None\n{MAIN}"
    command = [sys.executable, "-P", "-c", code, *argv.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.endswith(f"{module} is not installed: pip install 'jflash[{extra}]'")
