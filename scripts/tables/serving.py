"""The table of the engine and the server: goals, vLLM's numbers, and what was measured.

vLLM's are those of benchmarks/h200-vllm-*.json, of another run than jflash's.
"""

from typing import Any

from tables.cells import Result, percent, table, with_key

SHAPE = "qwen3-8b"  # of the shapes the one that has goals, and numbers of vLLM
GOALS = {  # tokens a second, by the kind of case and the batch
    ("forced", None): {1: 1100, 8: 5600, 32: 8000, 64: 8000},
    ("forced", "auto"): {32: 9000, 64: 9000},
    ("questions", None): {1: 4000, 32: 45000},
}
NAMES = {
    ("forced", None): "{shape}, {tau:.2f} tokens a step, {requests} requests",
    ("forced", "auto"): "the same, rows chosen, {requests} requests",
    ("questions", None): "{target}, GSM8K, through the engine",
    ("questions", "auto"): "the same, rows chosen",
}
FIRST = (  # ms to the first token, p50
    ("empty", "first token, empty", 25),
    ("beside", "first token, {running} running", 60),
    ("known", "first token, the same prompt again", 10),
)
SHARE = 0.85  # of the engine's, over HTTP
STALL = 50  # ms that a long prompt keeps a text waiting
STREAM = 16  # requests for each of several slots, of which the first and last weigh little
KINDS = (
    "forced",
    "few texts",
    "questions",
    "questions over HTTP",
    "beside a form",
    "first token",
    "long prompt",
)


def serving(results: list[Result]) -> str:
    """A line for each case that was measured, whatever runs they are of; the last file's counts."""
    cases, theirs = with_key(results, "serving"), with_key(results, "beside_vllm")
    cases.sort(key=lambda case: (case["date"], case["file"]))
    found = {place((case, row)): (case, row) for case in cases for row in case["serving"]}
    shown = [found[where] for where in sorted(found)]
    lines = [line for case, row in shown for line in lines_of(case, row, theirs)]
    head = ["tokens/s, prefill in the time", "batch", "goal", "vLLM 0.24", "jflash", "device busy"]
    return table(head, lines, [case for case, _ in shown])


def place(measured: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, ...]:
    """The order of lines: by the models, what was timed, the batch, and how long a burst was."""
    case, row = measured
    models = case.get("shape", ""), case.get("target", ""), case.get("drafter_dtype", "")
    slots = row["batch"]
    long = row["what"] == "forced" and slots > 1 and row["requests"] >= STREAM * slots
    few = row["requests"] if row["what"] == "few texts" else 0
    return models, KINDS.index(row["what"]), row["rows"] or "", slots, few, long


def lines_of(
    case: dict[str, Any], row: dict[str, Any], theirs: list[dict[str, Any]]
) -> list[list[Any]]:
    batch = row["batch"]
    if row["what"] == "first token":
        return [
            [name.format(**row), batch, f"≤ {goal} ms", "", f"{row[key]['p50_ms']:.1f} ms"]
            for key, name, goal in FIRST
        ]
    if row["what"] == "long prompt":
        text = "the longest stall of {texts} texts beside a prompt of {prompt_tokens:,} tokens"
        return [[text.format(**row), batch, f"≤ {STALL} ms", "", f"{row['stall_ms']:.1f} ms"]]
    busy = busy_text(row)
    if row["what"] == "beside a form":
        what = "{neighbours} texts beside one in a form, share of those beside a plain one"
        text = f"{row['tokens_per_second']:,.0f} ({percent(row['kept'])})"
        return [[what.format(**row), batch, "", "", text, busy]]
    if "share" in row:
        text = f"{row['tokens_per_second']:,.0f} ({percent(row['share'])})"
        what = f"the same over HTTP, {row['clients']} clients, share of the engine's"
        return [[what, batch, f"≥ {100 * SHARE:.0f} %", "", text, busy]]
    if row["what"] == "few texts" or case.get("shape", SHAPE) != SHAPE:
        how = "" if row["rows"] is None else ", rows chosen"
        what = f"{case['shape']}, {row['tau']:.2f} tokens a step{how}, {row['requests']} at once"
        return [[what, f"{batch} slots", "", "", f"{row['tokens_per_second']:,.0f}", busy]]
    kind = row["what"], row["rows"]
    goal, other = GOALS.get(kind, {}).get(batch), vllms(theirs, row, batch)
    dtype = f", drafter in {case['drafter_dtype']}" if "drafter_dtype" in case else ""
    names = {"shape": f"{case.get('shape')}{dtype}", "target": f"{case.get('target')}{dtype}"} | row
    return [[
        NAMES[kind].format(**names), batch,
        "" if goal is None else f"{goal:,}", "" if other is None else f"{other:,}",
        f"{row['tokens_per_second']:,.0f}{steadily(row)}", busy,
    ]]  # fmt: skip


def steadily(row: dict[str, Any]) -> str:
    """What a stream gave between its ends, see `jflash.bench.serving.steady`."""
    steady = row.get("steady")
    return f"; {steady['tokens_per_second']:,.0f} between its ends" if steady else ""


def busy_text(row: dict[str, Any]) -> str:
    """The device's share of the time, from what is certain to the most, where both are known."""
    most = percent(row["device_busy"])
    least = percent(row.get("device_busy_seen", row["device_busy"]))
    return most if least == most else f"{least} to {most}"


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
