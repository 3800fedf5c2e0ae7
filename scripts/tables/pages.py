"""The table of whole steps over keys and values in slots and in pages."""

from typing import Any

from tables.cells import Result, step_rows, table, with_key
from tables.steps import kind_name

ORDERS = ("pages", "shuffled")


def pages(results: list[Result]) -> str:
    """A line for each step that one file timed over slots and over pages."""
    rows, used = [], []
    for file in with_key(results, "step_times"):
        found = beside_slots(step_rows(file))
        rows += [
            [shape, kind_name(kind), batch, context, f"{times['slots']:.2f}", *(
                f"{times[order]:.2f} ({times[order] / times['slots']:.3f} ×)"
                if order in times else "" for order in ORDERS
            )]
            for (shape, kind, batch, context), times in found.items()
        ]  # fmt: skip
        used += [file] if found else []
    head = ["shape", "ms of", "batch", "context", "slots", "pages in order", "shuffled pages"]
    return table(head, rows, used)


def beside_slots(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """Milliseconds by place of each step that was timed over slots and elsewhere."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row.get("quantised") is None:
            key = row["shape"], row["kind"], row["batch"], row["context"]
            times.setdefault(key, {})[row.get("places", "slots")] = row["ms"]
    return {key: of for key, of in times.items() if "slots" in of and len(of) > 1}
