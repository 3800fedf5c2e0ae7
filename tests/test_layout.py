"""The rules of the tree: imports point down README's tree, every config field is read, the top
level is fixed."""

import ast
import dataclasses
import inspect
import os
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jflash.records import config, specs
from pallas_kernels.rms_norm import rms_norm

ROOT = Path(__file__).parents[1]
TREE = re.compile(r"^## The tree\n+```\n(.*?)^```", re.DOTALL | re.MULTILINE)


def rooms_of(readme: str) -> list[list[str]]:
    """README's tree, top to bottom: the modules of each line, whose paths stand before its text.

    A module may import from its line and from those below it.
    """
    tree = TREE.search(readme)
    assert tree, "README has no tree"
    floors = []
    for line in tree[1].splitlines():
        path = line.split("  ")[0]
        match = re.fullmatch(r"(.*?)(?:\{(.*)\})?([^{}]*)", path)
        assert match, f"README's tree: {line}"
        start, names, end = match.groups()
        paths = [start + name + end for name in (names or "").split(",")]
        for one in paths:
            assert list(ROOT.glob(one)), f"README's tree has {one}, which is not there"
        floors.append([module_of(one) for one in paths])
    return floors


def module_of(path: str) -> str:
    """What Python calls a path of the tree; scripts/ is where Python finds its folders."""
    path = re.sub(r"^scripts/(?=\w)", "", path)
    return re.sub(r"/__init__\.py$|/\*\.py$|\.py$|/$", "", path).replace("/", ".")


ROOMS = rooms_of((ROOT / "README.md").read_text(encoding="utf-8"))
FILES = sorted(
    file for top in ("jflash", "pallas_kernels", "scripts") for file in (ROOT / top).rglob("*.py")
)


def floor(module: str) -> int | None:
    """The level of the longest room name that holds the module; None for other people's code."""
    if module == "jflash.__main__":  # which Python wants there: it is the command line's door
        module = "jflash.cli"
    fits = [
        (len(room), level)
        for level, rooms in enumerate(ROOMS)
        for room in rooms
        if module == room or (room != "jflash" and module.startswith(room + "."))
    ]
    if fits:
        return max(fits)[1]
    assert not module.startswith(("jflash.", "pallas_kernels")), (
        f"{module} has no line in README's tree"
    )
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


def test_the_tree_is_read_from_readme():
    assert ROOMS[0] == ["scripts"] and ROOMS[-1] == ["pallas_kernels"]
    assert floor("jflash.cli.generate") < floor("jflash.io.load") < floor("jflash.speculative")
    assert floor("tables.cells") == floor("tiny_pair.recipe") < floor("jflash")
    assert rooms_of("## The tree\n```\njflash/{pair,rows}.py  a text\njflash/io/  b\n```") == [
        ["jflash.pair", "jflash.rows"], ["jflash.io"],
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="is not there"):
        rooms_of("## The tree\n```\njflash/nothing.py  a\n```")


def test_every_config_field_is_read():
    others = [f for f in FILES if f.name not in ("config.py", "moe_spec.py", "specs.py")]
    source = "\n".join(f.read_text(encoding="utf-8") for f in others)
    read = {n.attr for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)}
    named = {**vars(config), **vars(specs)}
    records = [x for x in named.values() if dataclasses.is_dataclass(x)]
    assert config.TargetConfig in records and specs.YarnScaling in records
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


@pytest.mark.skipif(os.environ.get("JFLASH_SHAPES") == "0", reason="nothing is checked")
def test_arrays_are_what_signatures_say():
    """While tests run; the modules that name no shapes are left as they are."""
    with pytest.raises(TypeCheckError, match="scale"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(3), 1e-6, backend="xla")
    assert hasattr(rms_norm, "__wrapped__") and not hasattr(specs.at_least_1, "__wrapped__")


@pytest.mark.parametrize("name", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_what_pyright_is_told_of_transformers_is_so(name):
    """Of each method the parameters; a model's class is none without torch."""
    import transformers

    stub = ast.parse((ROOT / ".ci/types/transformers/__init__.pyi").read_text(encoding="utf-8"))
    [told] = (x for x in stub.body if isinstance(x, ast.ClassDef) and x.name == name)
    methods = [x for x in told.body if isinstance(x, ast.FunctionDef)]
    assert methods
    for method in methods:
        args, real = method.args, getattr(getattr(transformers, name), method.name)
        names = [*args.args, args.vararg, *args.kwonlyargs, args.kwarg]
        names = [x.arg for x in names if x and x.arg != "cls"]
        assert list(inspect.signature(real).parameters) == names, method.name
