"""README's table of families: every ✓ has a test or a result, of that family."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from jflash.io.hf_config import TARGETS
from tables.evidence import CELLS

ROOT = Path(__file__).parents[2]
FAMILIES = json.loads((ROOT / "benchmarks" / "families.json").read_text())["families"]
# Tests that compare with what the reference recorded.
PARITY = ("step/test_reference_parity", "step/test_dflash2_parity")
LAW = ("law", "law on a GPU")  # of the table in LOSSLESS.md
BACKED = [(row, cell, row[cell]) for row in FAMILIES for cell in CELLS if row[cell]]


def read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def runs(module: str, test: str) -> set[str]:
    """What pytest calls the runs of a test that is made for each of some folders."""
    found = getattr(import_module("tests." + module.replace("/", ".")), test, None)
    marks = [m for m in getattr(found, "pytestmark", ()) if m.name == "parametrize"]
    return {case.id for mark in marks if mark.args[0] == "folder" for case in mark.args[1]}


def problem_of(row: dict, cell: str, backing: str) -> str:
    """What is wrong with what backs a cell; nothing if it is there and of this family."""
    if cell == "run on a GPU":
        result = ROOT / backing
        content = read(result) if result.exists() else {}
        cases = content.get("cases", []) + content.get("step_times", [])
        shapes = {case["shape"] for case in cases}
        return "" if shapes & set(row["shapes"]) else f"{backing} holds no case of it"
    found = re.fullmatch(r"tests/([\w/]+)\.py::(test_\w+)\[(\w+)-(pair\d\d)\]", backing)
    if not found:
        return f"{backing} is no test"
    if found[1] not in PARITY:
        return f"{backing} compares nothing with the reference"
    folder = ROOT / "tests" / "reference" / found[3] / found[4]
    if not folder.exists() or read(folder / "record.json")["family"] != row["model_type"]:
        return f"{found[4]} is not of this family"
    if f"{found[3]}-{found[4]}" not in runs(found[1], found[2]):
        return f"{backing} is not there"
    drafter = read(folder / "drafter" / "config.json")
    if cell == "window" and not drafter["use_sliding_window"]:
        return f"{found[4]} has no window"
    version = {"drafter v1": "DFlashDraftModel", "DFlash 2": "DFlash2DraftModel"}.get(cell)
    return (
        f"{found[4]} is not {version}" if version not in (None, *drafter["architectures"]) else ""
    )


@pytest.mark.parametrize(
    ("row", "cell", "backing"), BACKED, ids=[f"{r['family']}, {c}" for r, c, _ in BACKED]
)
def test_every_mark_is_backed(row, cell, backing):
    assert not problem_of(row, cell, backing)


def test_every_supported_family_has_a_row_with_a_tested_target():
    assert [row["model_type"] for row in FAMILIES] == list(TARGETS.values())
    for row in FAMILIES:
        assert row["target"] and row["parity tested"]
        assert row.keys() == {"family", "model_type", "shapes", *CELLS, *LAW}


@pytest.mark.parametrize("row", FAMILIES, ids=[row["family"] for row in FAMILIES])
def test_the_law_was_checked_with_the_familys_own_pair(row):
    module, test = "step/test_law_of_families", "test_a_familys_pair_has_plain_decodings_bits"
    name = row["law"].removeprefix(f"tests/{module}.py::{test}[").removesuffix("]")
    folder = ROOT / "tests" / "reference" / "cases" / name.removeprefix("cases-")
    assert (
        name in runs(module, test) and read(folder / "record.json")["family"] == row["model_type"]
    )
    assert (
        read(ROOT / "benchmarks" / "cpu-long-tests.json")["tests"][row["law"]]["outcome"]
        == "passed"
    )
    if row["law on a GPU"]:
        pairs = {pair["pair"]: pair for pair in read(ROOT / row["law on a GPU"])["law"]}
        [own] = [pairs[shape] for shape in row["shapes"] if shape in pairs]
        assert own["differences"] == 0 and all(fault["caught"] for fault in own["faults"])


def test_what_backs_nothing_is_noticed():
    row, test = FAMILIES[0], "tests/step/test_reference_parity.py::test_whole_generations"
    own = "[cases-pair02]"
    assert not problem_of(row, "target", test + own)
    assert "is not there" in problem_of(row, "target", test + "_of_nothing" + own)
    for other in ("test_nothing.py::test_it", "test_laws.py::test_stream_equals_generate"):
        assert "with the reference" in problem_of(row, "target", f"tests/{other}{own}")
    set_test = test.replace("whole_generations", "the_set_is_worth_its_name")
    for other in (set_test, test.replace("reference", "dflash2")):  # those folders are not its own
        assert "is not there" in problem_of(row, "target", other + own)
    for text in ("README.md", test):
        assert "is no test" in problem_of(row, "target", text)
    for pair in ("[cases-pair00]", "[cases-pair99]"):
        assert "not of this family" in problem_of(row, "target", test + pair)
    assert "has no window" in problem_of(row, "window", test + own)
    assert "is not DFlash2DraftModel" in problem_of(row, "DFlash 2", test + own)
    for file in ("h200-nothing.json", "h200-qwen3-8b.json"):
        assert "no case" in problem_of(FAMILIES[1], "run on a GPU", f"benchmarks/{file}")
