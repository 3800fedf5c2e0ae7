"""The parts of the tables: results of benchmarks/, their cases, Markdown."""

from collections.abc import Iterable
from typing import Any, NamedTuple

NEAR = 0.03  # by which a timed context may miss the round number


class Result(NamedTuple):
    """A file of benchmarks/."""

    name: str
    content: dict[str, Any]


def pairs_of(results: list[Result]) -> Iterable[tuple[Result, dict[str, Any]]]:
    """Every case with its file and the entries that the file's cases share."""
    for result in results:
        shared = {k: v for k, v in result.content.items() if k not in ("cases", "reference")}
        for case in result.content.get("cases", []):
            yield result, shared | case | {"file": result.name}


def with_key(results: list[Result], *keys: str) -> list[dict[str, Any]]:
    """The contents that have all of these keys, each with its file's name."""
    return [r.content | {"file": r.name} for r in results if r.content.keys() >= {*keys}]


def step_rows(file: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one device in a file of bench-steps; those of several are in no table."""
    return [row for row in file["step_times"] if row.get("tensor_parallel", 1) == 1]


def all_cases(results: list[Result]) -> list[dict[str, Any]]:
    return [case for _, case in pairs_of(results)]


def full_cases(results: list[Result]) -> list[dict[str, Any]]:
    return [case for case in all_cases(results) if "plain" in case]


def the_one(cases: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The one case, None without any; ValueError if several files hold it."""
    if len(cases) > 1:
        names = ", ".join(sorted(case["file"] for case in cases))
        raise ValueError(f"{names} hold the same case: keep one of them")
    return cases[0] if cases else None


def at_context(case: dict[str, Any], context: int) -> bool:
    return abs(case["context"] - context) <= NEAR * context


def ms(part: dict[str, Any]) -> str:
    return f"{part['ms']:.2f} ms"


def share(part: dict[str, Any]) -> str:
    return percent(part["share_of_floor"])


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def table(head: list[str], rows: list[list[Any]], cases: list[dict[str, Any]]) -> str:
    """Markdown, and a line on where and when the cases were measured."""
    if not rows:
        return "Not measured yet."
    lines = [head, ["---"] * len(head), *(row + [""] * (len(head) - len(row)) for row in rows)]
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    where: dict[str, set[str]] = {}
    for c in cases:
        measured = f"{c['device']}, jax {c['versions']['jax']}, {c['date']}"
        where.setdefault(measured, set()).add(f"`benchmarks/{c['file']}`")
    notes = [f"{measured}: {', '.join(sorted(files))}" for measured, files in sorted(where.items())]
    return text if not notes else text + "\n\n" + "; ".join(notes) + "."
