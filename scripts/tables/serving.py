"""The table of the engine and the server: goals, vLLM's numbers, and what was measured.

vLLM's are those of benchmarks/h200-vllm-*.json, of another run than jflash's.
"""

from typing import Any

from tables.cells import Result, percent, table, with_key

GOALS = {  # tokens a second, by the kind of case and the batch
    ("forced", None): {1: 1100, 8: 5600, 32: 8000, 64: 8000},
    ("forced", "auto"): {32: 9000, 64: 9000},
    ("questions", None): {1: 4000, 32: 45000},
}
NAMES = {
    ("forced", None): "{shape}, {tau:.2f} tokens a step",
    ("forced", "auto"): "the same, rows chosen",
    ("questions", None): "{target}, GSM8K, through the engine",
    ("questions", "auto"): "the same, rows chosen",
}
FIRST = (  # ms to the first token, p50
    ("empty", "first token, empty", 25),
    ("beside", "first token, {running} running", 60),
    ("known", "first token, the same prompt again", 10),
)
SHARE = 0.85  # of the engine's, over HTTP


def serving(results: list[Result]) -> str:
    """A line for each case that was measured."""
    cases = with_key(results, "serving")
    theirs = with_key(results, "beside_vllm")
    rows: list[list[Any]] = []
    for case in cases:
        names = {"shape": case.get("shape"), "target": case.get("target")}
        for row in case["serving"]:
            kind, batch = (row["what"], row["rows"]), row["batch"]
            if row["what"] == "first token":
                rows += [
                    [name.format(**row), batch, f"≤ {goal} ms", "",
                     f"{row[key]['p50_ms']:.1f} ms"]
                    for key, name, goal in FIRST
                ]  # fmt: skip
                continue
            if "share" in row:
                text = f"{row['tokens_per_second']:,.0f} ({percent(row['share'])})"
                what = f"the same over HTTP, {row['clients']} clients, share of the engine's"
                goal = f"≥ {100 * SHARE:.0f} %"
                rows.append([what, batch, goal, "", text, percent(row["device_busy"])])
                continue
            goal = GOALS.get(kind, {}).get(batch)
            other = vllms(theirs, row, batch)
            rows.append([
                NAMES[kind].format(**names, tau=row["tau"]), batch,
                "" if goal is None else f"{goal:,}", "" if other is None else f"{other:,}",
                f"{row['tokens_per_second']:,.0f}", percent(row["device_busy"]),
            ])  # fmt: skip
    head = ["tokens/s, prefill in the time", "batch", "goal", "vLLM 0.24", "jflash", "device busy"]
    return table(head, rows, cases)


def vllms(theirs: list[dict[str, Any]], row: dict[str, Any], batch: int) -> int | None:
    """vLLM's tokens a second for a case without chosen rows; None if it was not measured."""
    for case in theirs if row["rows"] is None else []:
        steps, pair = case["beside_vllm"]["steps"], case["beside_vllm"]["pair"]
        known = {
            "forced": steps["vllm_tokens_per_second_at_6.05"]["with_prefill"],
            "questions": pair["tokens_per_second"]["dflash"]["vllm"],
        }
        return known[row["what"]].get(str(batch))
    return None
