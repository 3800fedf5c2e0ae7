"""Tables of README, benchmarks/*.md and the model cards, made from the files in benchmarks/.

Text stands between `<!-- table: NAME -->` and `<!-- end table -->`; nothing else is touched.
A case that two files hold is an error, because the table could show only one of them.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from tables.beside import reference, summary, vllm
from tables.cells import Result
from tables.devices import several_gpus
from tables.evidence import evaluations, families, tiny_pair, tiny_pair_speed, trainings
from tables.losslessness import (
    law,
    law_of_families,
    lossless,
    plain_text,
    right_logits,
    width_1,
)
from tables.over_devices import law_over_devices
from tables.pages import pages
from tables.rows import row_steps, rows
from tables.serving import serving
from tables.step_goals import step_goals
from tables.step_kernels import step_kernels
from tables.steps import goals, in_turns, kernels, spent, steps, whole_steps, widths

MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end table -->)", re.DOTALL)
TABLES: dict[str, Callable[[list[Result]], str]] = {
    table.__name__: table
    for table in (
        *(summary, families),  # README
        *(goals, steps, whole_steps, step_goals, step_kernels),  # benchmarks/README
        *(pages, spent, several_gpus, in_turns),
        *(vllm, reference, widths, rows, row_steps, kernels),
        serving,  # benchmarks/SERVING
        *(law, law_of_families, law_over_devices, lossless),  # benchmarks/LOSSLESS
        *(right_logits, width_1, plain_text),
        *(evaluations, trainings, tiny_pair, tiny_pair_speed),  # the cards
    )
}


def documents(root: Path) -> list[Path]:
    """The texts with tables."""
    patterns = ("README.md", "CONTRIBUTING.md", "benchmarks/*.md", "checkpoints/**/README.md")
    return [file for pattern in patterns for file in sorted(root.glob(pattern))]


def read_results(folder: Path) -> list[Result]:
    """All results of a folder, by name."""
    files = sorted(folder.glob("*.json"))
    return [Result(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def with_tables(text: str, results: list[Result]) -> str:
    """The text with every marked table made anew; ValueError for a name that is no table."""

    def made(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"no table is called {match[2]!r}: use one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]](results)}\n{match[4]}"

    if len(MARKED.findall(text)) != len(re.findall(r"<!-- (?:table:|end table)", text)) / 2:
        raise ValueError("a table is opened and not closed, or closed and not opened")
    return MARKED.sub(made, text)
