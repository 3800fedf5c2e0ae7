"""Tables of jflash beside vLLM and the authors' PyTorch code, and README's summary of results.

vLLM was measured by hand on the same GPU as jflash (benchmarks/h200-vllm-*.json says how); its
numbers and jflash's of that run stand together and are never mixed with those of other runs.
"""

from typing import Any

from tables.cells import Result, ms, pairs_of, table, with_key
from tables.losslessness import checks_of, compared_tokens

WHO = ("jflash", "vllm")


def summary(results: list[Result]) -> str:
    """README's table: steps and a real pair beside other code, and what was compared."""
    rows: list[list[Any]] = []
    used: list[dict[str, Any]] = []
    for case in with_key(results, "beside_vllm"):
        other = f"vLLM {case['versions']['vllm']}"
        steps, pair = case["beside_vllm"]["steps"], case["beside_vllm"]["pair"]
        for label, part in (("plain", "plain"), ("DFlash", "step")):
            batches = list(steps["ms"][part]["jflash"])
            rows.append([
                f"{label} step, {steps['shape']}, context {steps['context']}, "
                f"batch {' / '.join(batches)}",
                *(joined(steps["ms"][part][who], batches) + " ms" for who in WHO),
                other,
            ])  # fmt: skip
        speeds = pair["tokens_per_second"]
        for batch in speeds["plain"]["jflash"]:
            both = [[speeds[how][who][batch] for how in ("plain", "dflash")] for who in WHO]
            rows.append([
                f"{pair['target']}, GSM8K, batch {batch}: plain → DFlash, tokens/s",
                *(f"{plain:,} → {fast:,} ({fast / plain:.2f} ×)" for plain, fast in both), other,
            ])  # fmt: skip
        theirs = pair["same_text"]["with_and_without_drafts_at_32"]
        found = with_key(results, "same")
        if found:
            least = min(found, key=lambda one: equal_answers(one) / one["answers"])
            again = f", in each of {len(found)} processes" if len(found) > 1 else ""
            rows.append([
                "the same, batch 32: answers equal to plain decoding's",
                f"{equal_answers(least):,} of {least['answers']:,}{again}",
                f"{theirs['vllm']} of {theirs['of']}", other,
            ])  # fmt: skip
            used += found
        used.append(case)
    for theirs, case in referenced(results):
        rows.insert(len(rows) and 2, [
            f"plain / DFlash step, {case['shape']}, context {case['context']:.0f}, batch 1",
            f"{case['plain']['ms']:.2f} / {case['step']['ms']:.2f} ms",
            f"{theirs['plain']['ms_per_step']:.1f} / {theirs['dflash']['ms_per_step']:.1f} ms",
            f"PyTorch, dflash {theirs['versions']['dflash']}",
        ])  # fmt: skip
        used.append(case)
    checks = checks_of(results)
    if checks:
        different = sum(check["differences"] for check in checks)
        rows.append([
            "tokens with drafts, compared with the same program's without",
            f"{compared_tokens(checks):,}, {different} differ",
        ])  # fmt: skip
        used += checks
    return table(["", "jflash", "other", "the other is"], rows, used)


def vllm(results: list[Result]) -> str:
    """Steps of jflash and of vLLM by batch: milliseconds, their ratio, the floor."""
    rows, cases = [], with_key(results, "beside_vllm")
    for case in cases:
        steps = case["beside_vllm"]["steps"]
        for label, part in (("plain", "plain"), ("DFlash", "step")):
            times = steps["ms"][part]
            for batch, theirs in times["vllm"].items():
                ours = times["jflash"].get(batch)
                rows.append([
                    f"{steps['shape']}, {label}", batch, f"{theirs:.2f} ms",
                    *([f"{ours:.2f} ms", f"{theirs / ours:.2f} ×"] if ours else ["", ""]),
                    f"{times['floor'][batch]:.2f} ms" if batch in times["floor"] else "",
                ])  # fmt: skip
    head = ["step", "batch", "vLLM", "jflash", "vLLM / jflash", "floor"]
    return table(head, rows, cases)


def reference(results: list[Result]) -> str:
    """The authors' PyTorch code beside jflash, on the same weights."""
    rows, cases = [], []
    for theirs, case in referenced(results):
        ratio = theirs["times_as_long"]
        versions = f"dflash {theirs['versions']['dflash']}, torch {theirs['versions']['torch']}"
        for label, part, a in (("plain", "plain", "plain"), ("DFlash step", "dflash", "step")):
            milliseconds = theirs[part]["ms_per_step"]
            step, theirs_ms = f"{case['shape']}, {label}", f"{milliseconds:.1f}"
            rows.append([step, theirs_ms, ms(case[a]), f"{ratio[a]:.1f} ×", versions])
        cases.append(case)
    return table(["batch 1, ms", "PyTorch", "jflash", "ratio", "versions"], rows, cases)


def joined(times: dict[str, float], batches: list[str]) -> str:
    return " / ".join(f"{times[batch]:.2f}" for batch in batches)


def referenced(results: list[Result]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The PyTorch code's times, and jflash's case at batch 1 on the same weights."""
    return [
        (r.content["reference"], c)
        for r, c in pairs_of(results)
        if "reference" in r.content and c["batch"] == 1
    ]


def equal_answers(found: dict[str, Any]) -> int:
    """The least of the ways that decoded all answers; plain decoding at batch 1 ties a few."""
    compared = found.get("compared", {})
    answers = found["answers"]
    return min(n for way, n in found["same"].items() if compared.get(way, answers) == answers)
