"""The wheel: built from the tree, it holds what it needs and decodes without the tree."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jflash.system.embedded import EMBEDDED_PAIR
from tiny_pair.word_problems import extract_result, problems

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "default_prompt.json"
SOURCES = ("jflash", "pallas_kernels", "checkpoints", "benchmarks", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's content, as an installation has it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in (*SOURCES, "LICENSE"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "smollm2*")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--wheel-dir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = out.glob("*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    shutil.rmtree(tree)
    return site


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_every_module_and_the_pair_are_in_the_wheel(installed):
    for package in ("jflash", "pallas_kernels"):
        modules = {str(f.relative_to(ROOT)) for f in (ROOT / package).rglob("*.py")}
        assert {str(f.relative_to(installed)) for f in (installed / package).rglob("*.py")} == (
            modules
        )
    assert (installed / "jflash/proof/questions.jsonl").exists()
    assert (installed / "jflash/server/page.html").exists()
    assert contents(installed / "jflash/data/tiny-math") == contents(EMBEDDED_PAIR)
    tops = {file.name for file in installed.iterdir() if file.suffix != ".dist-info"}
    assert tops == {"jflash", "pallas_kernels"}
    [entry] = installed.glob("*.dist-info/entry_points.txt")
    assert "jflash = jflash.cli.main:main" in entry.read_text()


@pytest.mark.long
def test_it_decodes_the_default_prompt_in_an_empty_folder(installed, as_users, tmp_path):
    """The console command's own line, with the embedded pair as its default: tokens and acceptance
    lengths are those of the day when the pair shipped."""
    code = "import sys; from jflash.cli.main import main; sys.exit(main())"
    argv = ("-P", "-c", code, "generate", "--json", "--dtype", "float32")
    done = as_users(*argv, path=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    got, want = json.loads(done.stdout), json.loads(GOLDEN.read_text())
    assert got["target"] == str(installed / "jflash/data/tiny-math/target")
    assert {key: got[key] for key in want} == want
    assert got["mean_acceptance_length"] >= 5
    assert extract_result(got["text"]) == next(problems("eval", seed=38)).result
    assert list(tmp_path.iterdir()) == []


def test_each_file_is_kept_once():
    """The links of the tree lead to the folders that people look into."""
    assert EMBEDDED_PAIR.resolve() == ROOT / "checkpoints" / "tiny-math"
