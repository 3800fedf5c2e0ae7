"""The PyTorch reference's records, and what tests need that only .ci/run makes.

Knows variables and folders; what is compared is the tests' own.
"""

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jflash import load_pair
from jflash.generate import Pair

PYTHON = "JFLASH_REFERENCE_PYTHON"  # an interpreter with torch, transformers and dflash 0.1.0
SMOLLM2 = "JFLASH_SMOLLM2_GGUF"  # the file SmolLM2-135M-Instruct.Q4_1.gguf
FRESH = ("JFLASH_FRESH_CASES", "JFLASH_FRESH_DFLASH2_CASES")  # folders of new pairs
GEMMA3 = "JFLASH_GEMMA3_GGUF"  # the file gemma-3-270m-q4_k_m.gguf


def marks(*variables: str) -> list[pytest.MarkDecorator]:
    """Of a test that needs these variables: `pytest -m reference` runs all such tests."""
    missing = [name for name in variables if name not in os.environ]
    skipped = pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}")
    return [pytest.mark.reference, skipped]


def needs(*variables: str) -> Callable:
    """A test with these marks."""

    def marked(test: Callable) -> Callable:
        for mark in marks(*variables):
            test = mark(test)
        return test

    return marked


def path_of(variable: str) -> str:
    return os.environ[variable]


def run_reference(*arguments: object) -> subprocess.CompletedProcess:
    """The reference's interpreter with these arguments, on one thread: torch's wait busily."""
    command = [path_of(PYTHON), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def case_sets(committed: Path, variable: str) -> list:
    """The committed folder of cases, and the fresh one that the variable names."""
    fresh = Path(os.environ.get(variable, "fresh"))
    return [
        pytest.param(committed, id=committed.name),
        pytest.param(fresh, id="fresh", marks=marks(variable)),
    ]


def case_folders(*sets) -> list:
    """Every pair of the sets, with its set's marks."""
    return [
        pytest.param(folder, id=f"{cases.id}-{folder.name}", marks=cases.marks)
        for cases in sets
        for folder in sorted(cases.values[0].glob("pair*"))
    ]


def long_but_for(folders: list, *names: str) -> list:
    """The folders, each a long test unless it is named."""
    return [
        x if x.id in names else pytest.param(*x.values, id=x.id, marks=(*x.marks, pytest.mark.long))
        for x in folders
    ]


def fresh(folders: list) -> list[str]:
    """The names of those that .ci/run makes anew."""
    return [x.id for x in folders if x.id.startswith("fresh-")]


def families(cases: Path) -> set[str]:
    """Of a committed set's targets; of a fresh one's and the other fresh one's, which has those
    that this one leaves out."""
    folders = [cases]
    if any(str(cases) == os.environ.get(name) for name in FRESH):
        folders = [Path(os.environ[name]) for name in FRESH if name in os.environ]
    return {record(pair)["family"] for folder in folders for pair in folder.glob("pair*")}


def record(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())


@functools.lru_cache(8)
def pair(folder: Path, block_size: int | None = None) -> Pair:
    return load_pair(folder / "target", folder / "drafter", dtype="float32", block_size=block_size)


def close(got, want, least: float = 0.0) -> None:
    """Equal to 1e-4 of the largest entry, or of `least`: float32 sums in another order."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    largest = max(least, np.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * largest)
