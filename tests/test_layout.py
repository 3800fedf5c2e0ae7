"""The tree's own rules: imports point down, every config field is read, the top level is fixed."""

import ast
import dataclasses
from pathlib import Path

import pytest

from jflash import config

ROOT = Path(__file__).parents[1]
# Top to bottom: a module may import from its own room and from those below it.
ROOMS = [
    ("scripts",),
    ("tables", "tiny_pair"),
    ("jflash.cli",),
    ("jflash.evals", "jflash.proof"),
    ("jflash.bench",),
    ("jflash.training",),
    ("jflash",),
    ("jflash.memory",),
    ("jflash.io",),
    ("jflash.engine",),
    ("jflash.acceptance", "jflash.backends", "jflash.generate", "jflash.programs"),
    ("jflash.prefill",),
    ("jflash.speculative",),
    ("jflash.sampling",),
    ("jflash.models",),
    ("jflash.layers",),
    ("jflash.experts",),
    ("jflash.cache", "jflash.rope"),
    ("jflash.config", "jflash.device", "jflash.files", "jflash.platform"),
    ("pallas_kernels",),
]
FILES = sorted(
    file for top in ("jflash", "pallas_kernels", "scripts") for file in (ROOT / top).rglob("*.py")
)


def floor(module: str) -> int | None:
    """The level of the longest room name that holds the module; None for other people's code."""
    fits = [
        (len(room), level)
        for level, rooms in enumerate(ROOMS)
        for room in rooms
        if module == room or (room != "jflash" and module.startswith(room + "."))
    ]
    if fits:
        return max(fits)[1]
    assert not module.startswith(("jflash.", "pallas_kernels")), f"{module} has no room"
    return None


def imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_down(file: Path):
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "scripts" and len(parts) > 2 else parts
    own = floor(".".join(p for p in parts if p != "__init__"))
    assert own is not None
    for name in imports(file):
        level = floor(name)
        assert level is None or level >= own, f"{file} imports {name}, which lies above it"


def test_every_config_field_is_read():
    source = "\n".join(f.read_text(encoding="utf-8") for f in FILES if f.name != "config.py")
    read = {n.attr for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)}
    records = [x for x in vars(config).values() if dataclasses.is_dataclass(x)]
    assert config.MoeConfig in records and config.Sight in records
    for record in records:
        for field in dataclasses.fields(record):
            assert field.name in read, f"{record.__name__}.{field.name} is never read"


def test_top_level_is_the_users():
    import subprocess

    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    top = {name.split("/")[0] for name in listed if name}
    fixed = {"pyproject.toml", "README.md", "jflash", "pallas_kernels", "tests", "scripts"}
    assert {n for n in top if not n.startswith(".")} <= fixed | {
        "benchmarks", "checkpoints", "LICENSE", "CONTRIBUTING.md",
    }  # fmt: skip
