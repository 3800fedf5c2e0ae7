"""Which block width is best: measured step times by width against how many drafts are accepted.

A drafter may run narrower than it was trained: a step then costs less and commits less. The times
come from benchmarks/*.json as `jflash benchmark --widths` writes them: one file serves the tables
of the texts and the choice of a width, and the package holds a copy. Another file may be named.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jflash.config import DrafterConfig, TargetConfig
from jflash.embedded import MEASURED
from jflash.memory import weight_bytes

# What public drafters of block 16 reach on grade-school mathematics, greedy (6.4 to 6.5).
USUAL_TOKENS_A_STEP, USUAL_WIDTH = 6.4, 16
LIKE_IN_SIZE = 1.15  # weights that differ by no more than this factor count as one shape
LIKE_IN_BATCH = 3.0


class WidthTable(NamedTuple):
    """Milliseconds of a step by block width, and where they were measured."""

    ms: Mapping[int, float]
    batch: int
    weights_bytes: int
    device: str
    name: str


class Choice(NamedTuple):
    """A block width and the sentence that says why."""

    block_size: int
    why: str


def geometric_profile(tokens_a_step: float, width: int) -> list[float]:
    """P(at least k drafts are accepted), k = 1 … width - 1, each draft as likely as the last.

    `tokens_a_step` is the mean acceptance length at `width`, bonus included; ValueError outside
    1 … width.
    """
    if not 1 <= tokens_a_step <= width:
        raise ValueError(f"{tokens_a_step} tokens a step: within 1 … {width}")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum(rate**k for k in range(width)) < tokens_a_step:
            low = rate
        else:
            high = rate
    return [high**k for k in range(1, width)]


def usual_profile(width: int) -> list[float]:
    """The assumed profile of a drafter that nobody measured."""
    return geometric_profile(USUAL_TOKENS_A_STEP, USUAL_WIDTH)[: width - 1]


def expected_tokens(accepted: Sequence[float], width: int) -> float:
    """Tokens a step commits at `width`: E[min(a + 1, width)] for a accepted drafts.

    accepted[k - 1] = P(a ≥ k) at a width of at least `width`.
    """
    if not 1 <= width <= len(accepted) + 1:
        raise ValueError(f"width {width}: the profile reaches 1 … {len(accepted) + 1}")
    return 1.0 + sum(accepted[: width - 1])


def best_width(ms: Mapping[int, float], accepted: Sequence[float]) -> int:
    """The width with the most expected tokens a second; the narrower of two that are equal."""
    usable = sorted(width for width in ms if width <= len(accepted) + 1)
    if not usable:
        raise ValueError(f"no width of {sorted(ms)} is within {len(accepted) + 1}")
    return max(usable, key=lambda width: expected_tokens(accepted, width) / ms[width])


def auto_block_size(
    target: TargetConfig,
    drafter: DrafterConfig,
    *,
    batch: int,
    itemsize: int,
    device: str,
    accepted: Sequence[float] | None = None,
    table: Path | None = None,
) -> Choice:
    """The best width for these models at `batch`, by the nearest measured table.

    `itemsize`: bytes of a weight. `device`: evals.device.device_name() of where it will run.
    `accepted`: P(at least k drafts accepted), k = 1 … block_size - 1; by default usual_profile.
    `table`: a file of results, by default all in benchmarks/. ValueError, with the command that
    measures one, if none is of this device and near these models and this batch.
    """
    accepted = usual_profile(drafter.block_size) if accepted is None else accepted
    files = sorted(MEASURED.glob("*.json")) if table is None else [table]
    size = weight_bytes((target, drafter), itemsize)
    near = [
        t
        for t in (t for file in files for t in read_tables(file))
        if t.device == device
        and drafter.block_size in t.ms
        and _apart(t.weights_bytes, size) <= math.log(LIKE_IN_SIZE)
        and _apart(t.batch, batch) <= math.log(LIKE_IN_BATCH)
    ]
    if not near:
        raise ValueError(
            f"--block-size auto: no measured table fits {device}, {size / 1e9:.1f} GB of weights, "
            f"block {drafter.block_size}, batch {batch}; measure one: python scripts/benchmark.py "
            f"--target DIR --drafter DIR --batch {batch} --only-step --no-memory "
            "--widths 2,4,6,8,10,12 --json benchmarks/NAME.json"
        )
    found = min(near, key=lambda t: (_apart(t.batch, batch), _apart(t.weights_bytes, size)))
    width = best_width(found.ms, accepted)
    return Choice(
        width,
        f"block size {width}: {found.ms[width]:.2f} ms and {expected_tokens(accepted, width):.2f} "
        f"expected tokens a step, by {found.name}, batch {found.batch}",
    )


def read_tables(file: Path) -> list[WidthTable]:
    """All tables of several widths in a result file; ValueError if it is none."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as a result of benchmark.py: {error}") from None
    if not isinstance(result, dict) or not isinstance(result.get("cases", []), list):
        raise ValueError(f"{file} is no result of benchmark.py")
    return [
        _table(case, result["device"], file.name)
        for case in result.get("cases", [])
        if len(case.get("widths", [])) > 1
    ]


def _table(case: dict[str, Any], device: str, name: str) -> WidthTable:
    return WidthTable(
        ms={row["block_size"]: row["ms"] for row in case["widths"]},
        batch=case["batch"],
        weights_bytes=case["memory"]["weights_bytes"],
        device=device,
        name=name,
    )


def _apart(a: int, b: int) -> float:
    return abs(math.log(a / b))
