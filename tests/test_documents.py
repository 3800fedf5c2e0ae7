"""README, CONTRIBUTING, benchmarks/*.md, the cards: short enough, and what they name is there."""

import re
from pathlib import Path

import pytest

from jflash.cli.main import COMMANDS, make_parser
from tables.documents import documents

ROOT = Path(__file__).parents[1]
DOCUMENTS = documents(ROOT)
TOPS = ("benchmarks", "checkpoints", "jflash", "pallas_kernels", "scripts", "tests")
WRITTEN = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w./*-]+)`")
PLACEHOLDER = re.compile(r"NAME|\bOP\b|_OP\b|DEVICE")  # for the reader to fill in
LINK = re.compile(r"\]\(([^)#:]+)(?:#[\w-]+)?\)")
NAMED_OPTION = re.compile(r"`(--[a-z][a-z-]+)\b(?!_)")
# A command as it is typed, to the end of what is its own: `scripts/x.py …` or `jflash x …`.
TYPED = re.compile(rf"\b(?:scripts/(\w+)\.py|jflash ({'|'.join(COMMANDS)}))\b([^\n&|#`]*)")


def missing(file: Path, text: str) -> list[str]:
    """Paths that a text names and that are not in the tree."""
    linked = [name for name in LINK.findall(text) if not (file.parent / name).exists()]
    written = [name for name in WRITTEN.findall(text) if not PLACEHOLDER.search(name)]
    return linked + [name for name in written if not list(ROOT.glob(name))]


def options_in(file: Path) -> set[str]:
    return set(re.findall(r'"(--[a-z][a-z0-9-]*)"', file.read_text(encoding="utf-8")))


CLI = ROOT / "jflash" / "cli"
OF_ALL = {"--help"} | options_in(CLI / "command.py") | options_in(CLI / "jax_setup.py")


def options(command: str) -> set[str]:
    """The options of `jflash COMMAND`."""
    return set(make_parser(command)._option_string_actions) | OF_ALL


def options_of_script(name: str) -> set[str]:
    file = ROOT / "scripts" / f"{name}.py"
    command = re.search(r'tree\.run\("([\w-]+)"\)', file.read_text(encoding="utf-8"))
    return options(command[1]) if command else options_in(file) | OF_ALL


def unknown_options(text: str) -> list[str]:
    """Options that a text gives a command which has none of that name."""
    text = text.replace("\\\n", " ")
    every = options_of_script("benchmark_tables").union(*map(options, COMMANDS))
    unknown = [name for name in NAMED_OPTION.findall(text) if name not in every]
    for script, command, typed in TYPED.findall(text):
        if PLACEHOLDER.search(script):
            continue
        known = options_of_script(script) if script else options(command)
        unknown += [
            name for name in re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", typed) if name not in known
        ]
    return unknown


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
def test_what_a_document_names_is_there(file):
    text = file.read_text(encoding="utf-8")
    assert not missing(file, text)
    assert not unknown_options(text)


def test_what_is_not_there_is_noticed():
    text = "[a](LICENSE) [b](no.md#x) `jflash/generate.py` `jflash/nothing.py` `jflash/NAME.py` [c](https://x.org)"
    assert missing(ROOT / "README.md", text) == ["no.md", "jflash/nothing.py"]
    text = "`--seed` `--sed` scripts/generate.py --oracle \\\n --orcle\njflash train --lr 1 & x --y"
    assert unknown_options(text) == ["--sed", "--orcle", "--lr"]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
