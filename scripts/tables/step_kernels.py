"""The table of the kernels that whole steps spend most of their time in, by a profiler's trace."""

from typing import Any

from tables.cells import Result, percent, step_rows, table, with_key
from tables.steps import kept_as, kind_name

LONGEST = 5  # that a line names


def step_kernels(results: list[Result]) -> str:
    """A line for each step that was traced; the last file's counts."""
    files = sorted(with_key(results, "step_times"), key=lambda file: (file["date"], file["file"]))
    last = {
        (kept_as(row), row["kind"], row["context"], row["batch"]): (row, file)
        for file in files
        for row in step_rows(file)
        if row.get("kernels") and row.get("places", "slots") == "slots"
    }
    rows = [
        [
            key[0], kind_name(key[1]), key[3], f"{row['ms']:.2f}", f"{row['kernels_ms']:.2f}",
            ", ".join(
                f"`{name}` {us / 1e3:.2f} ({percent(us / 1e3 / row['kernels_ms'])}, {launches:.0f})"
                for name, (us, launches) in longest(row)
            ),
        ]
        for key, (row, _) in sorted(last.items(), key=lambda item: item[0])
    ]  # fmt: skip
    names = "the longest, ms (of the kernels, launches)"
    head = ["shape", "ms of", "batch", "step", "its kernels", names]
    return table(head, rows, [file for _, file in last.values()])


def longest(row: dict[str, Any]) -> list[tuple[str, tuple[float, float]]]:
    """Microseconds and launches of the longest kernels, one kernel's forms together."""
    sums: dict[str, tuple[float, float]] = {}
    for kernel in row["kernels"]:
        name = kernel["name"].removesuffix("_mosaic_gpu_kernel").rstrip("_")
        us, launches = sums.get(name, (0.0, 0.0))
        sums[name] = us + kernel["us"], launches + kernel["launches"]
    return sorted(sums.items(), key=lambda item: -item[1][0])[:LONGEST]
