"""README, CONTRIBUTING, benchmarks/*.md, the cards: short enough, and what they name is there."""

import re
from pathlib import Path

import pytest

from tables.documents import documents

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*documents(ROOT), ROOT / "tests" / "reference" / "README.md"]
TOPS = ("benchmarks", "checkpoints", "jflash", "pallas_kernels", "scripts", "tests")
WRITTEN = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w./*-]+)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[\w-]+)?\)")


def missing(file: Path, text: str) -> list[str]:
    """Paths that a text names and that are not in the tree."""
    linked = [name for name in LINK.findall(text) if not (file.parent / name).exists()]
    return linked + [name for name in WRITTEN.findall(text) if not list(ROOT.glob(name))]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_every_path_in_a_document_is_there(file):
    assert not missing(file, file.read_text(encoding="utf-8"))


def test_a_path_that_is_not_there_is_noticed():
    text = "[a](LICENSE) [b](no.md#x) `jflash/config.py` `jflash/nothing.py` [c](https://x.org)"
    assert missing(ROOT / "README.md", text) == ["no.md", "jflash/nothing.py"]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
