"""The templates of templates.txt, compiled: a story each, by its number of steps."""

from collections.abc import Callable
from math import gcd
from pathlib import Path
from typing import NamedTuple

from tiny_pair.word_problems.draft import Draft, Rng
from tiny_pair.word_problems.words import WORDS


class Template(NamedTuple):
    """A story; one that is held out names the templates that teach its steps."""

    name: str
    taught_by: str  # empty: not held out
    steps: int
    draw: Callable[[Rng], Draft]


def _template(heading: str, *lines: str) -> Template:
    """Compiles a block of templates.txt, where the format is explained."""
    name, _, taught_by = heading.strip("[]").partition(": ")
    draws: list[str] = []
    texts: dict[str, list[str]] = {"?": [], "=": []}
    for line in lines:
        mark, _, text = line.partition(" ")
        draws.append(line) if mark not in texts else texts[mark].append(f"f{text!r},")
    questions, answer = (f"({' '.join(found)})" for found in texts.values())
    body = [*draws, f"return Draft(numbers, {questions}, {answer}, result)"]
    names = {**WORDS, "Draft": Draft, "gcd": gcd}
    exec("\n ".join(["def draw(r):", *body]), names)
    return Template(name, taught_by, len(texts["="]), names["draw"])


def _read(file: Path) -> dict[int, tuple[Template, ...]]:
    blocks = file.read_text(encoding="utf-8").strip().split("\n\n")[1:]
    templates = [_template(*block.splitlines()) for block in blocks]
    return {n: tuple(t for t in templates if t.steps == n) for n in range(1, 6)}


TEMPLATES = _read(Path(__file__).with_name("templates.txt"))
