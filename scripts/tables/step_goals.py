"""The table of whole steps beside their goals and vLLM's."""

from collections.abc import Sequence
from typing import Any

from tables.cells import Result, step_rows, table, with_key

CONTEXT = 1024
# What, the shape, the kind, and the goal in ms by batch at CONTEXT of 2048 tokens.
GOALS: Sequence[tuple[str, str, str, dict[int, float]]] = (
    ("plain", "qwen3-8b", "plain", {1: 4.3, 8: 4.45, 32: 5.5}),
    ("DFlash step", "qwen3-8b", "step", {1: 5.2, 8: 6.4, 32: 16.2, 64: 31.5}),
    ("step, drafter in float8", "qwen3-8b", "float8", {1: 4.85, 8: 5.9, 32: 15.2, 64: 29.3}),
    ("DFlash step", "smollm2-135m", "step", {1: 0.95, 32: 1.6}),
    ("DFlash step", "qwen3-coder-30b", "step", {1: 10.8, 8: 16.8}),
)


# The same at the context of vLLM's run, where there is one.
NEAR = {("qwen3-8b", "step"): {32: 15.4, 64: 29.8}, ("qwen3-8b", "float8"): {32: 14.5}}


def step_goals(results: list[Result]) -> str:
    """Whole steps with a goal, and vLLM's at its own context; the last file's time counts."""
    found = sorted(with_key(results, "step_times"), key=lambda file: (file["date"], file["file"]))
    last = {
        (row["shape"], row["kind"], row["context"], row["batch"]): (row["ms"], file)
        for file in found
        for row in step_rows(file)
        if row.get("places", "slots") == "slots" and row.get("quantised") is None
    }
    if not found:
        return table([], [], [])
    times, used = {key: ms for key, (ms, _) in last.items()}, list[dict[str, Any]]()
    beside = with_key(results, "beside_vllm")
    near, theirs = None, {}
    for case in beside:
        steps = case["beside_vllm"]["steps"]
        near = steps["context"]
        for kind, by in steps["ms"].items():
            theirs |= {
                (steps["shape"], kind, int(batch)): ms for batch, ms in by.get("vllm", {}).items()
            }
    rows: list[list[Any]] = []
    for what, shape, kind, goals in GOALS:
        for batch, goal in goals.items():
            keys = [(shape, kind, context, batch) for context in (CONTEXT, near)]
            at, nearer = map(times.get, keys)
            used += [last[key][1] for key in keys if key in last]
            vllm = theirs.get((shape, kind, batch))
            rows.append([
                f"{shape}, {what}, batch {batch}", goal,
                "not measured" if at is None else f"{at:.2f} ({at / goal:.2f} ×)",
                "" if nearer is None else f"{nearer:.2f}{_goal(shape, kind, batch)}",
                "" if vllm is None else f"{vllm:.2f}",
            ])  # fmt: skip
    head = [f"ms at context {CONTEXT}", "goal", "measured", f"at {near}", f"vLLM at {near}"]
    return table(head, rows, [*used, *beside])


def _goal(shape: str, kind: str, batch: int) -> str:
    goal = NEAR.get((shape, kind), {}).get(batch)
    return "" if goal is None else f" (goal {goal})"
