"""README's tables from the files in benchmarks/: every number has a result, every family a test.

Text stands between `<!-- table: NAME -->` and `<!-- end table -->`; nothing else is touched.
Measures nothing. A case that two files hold is an error: which of them should be shown?
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jflash.evals.widths import best_width, expected_tokens, geometric_profile

MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end table -->)", re.DOTALL)
GOALS = (  # what, the goal, batch, context, part and number of a qwen3-8b case
    ("plain decoding, batch 1", 4.3, 1, 1024, "plain"),
    ("DFlash step, batch 1", 5.1, 1, 1024, "step"),
    ("DFlash step, batch 8", 6.2, 8, 1024, "step"),
    ("DFlash step, batch 32", 15.0, 32, 1024, "step"),
    ("DFlash step, batch 1, context 32k of 32k", 6.8, 1, 32768, "step"),
)
GOAL_SHAPE, NEAR = "qwen3-8b", 0.03  # by which a timed context may miss the round number
CELLS = ("target", "drafter v1", "window", "DFlash 2", "parity tested", "run on a GPU")
TAUS = (3.0, 4.0, 5.0, 6.4, 8.0)


class Result(NamedTuple):
    """What a file of benchmarks/ holds."""

    name: str
    content: dict[str, Any]


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


def goals(results: list[Result]) -> str:
    """The goals of the step at Qwen3-8B's shapes on one H200, and what was measured."""
    whole = full_cases(results)
    steps_alone = [c for c in all_cases(results) if c not in whole and len(c["widths"]) == 1]
    rows, used = [], []
    for what, goal, batch, context, part in GOALS:
        fits = [
            [c for c in cases if c["shape"] == GOAL_SHAPE and c["batch"] == batch
             and near(c, context) and part in c]
            for cases in (whole, steps_alone)
        ]  # fmt: skip
        case = only(fits[0] or fits[1])
        if case is None:
            rows.append([what, f"≤ {goal} ms", "not measured", "", ""])
            continue
        used += [] if case in used else [case]
        p = case[part]
        rows.append([what, f"≤ {goal} ms", ms(p), f"{p['floor_ms']:.2f}", share(p)])
    first = only([c for c in used if c["batch"] == 1 and near(c, 1024)])
    if first is not None:
        rows.append(
            ["draft share of the step, batch 1", "≤ 22 %", percent(first["draft"]["share_of_step"])]
        )
    shown = [c for c in used if "peak_over_weights_and_caches" in c["memory"]]
    if shown:
        peaks = [c["memory"]["peak_over_weights_and_caches"] for c in shown]
        what = "peak memory over weights + caches, with a warm cache, the worst"
        rows.append([what, "≤ 6 %", percent(max(peaks))])
        most = max(map(compiling, shown))
        rows.append(["the same while compiling from nothing", "", percent(most)])
        for name, label, goal in (
            ("from_nothing", "compiling from nothing, the slowest", 60),
            ("warm_cache", "compiling with a warm cache, the slowest", 15),
        ):
            slowest = max(c["compile_seconds"][name] for c in shown)
            rows.append([label, f"≤ {goal} s", f"{slowest:.1f} s"])
    return table(["", "goal", "measured", "floor, ms", "share of the floor"], rows, used)


def compiling(case: dict[str, Any]) -> float:
    """By how much the peak of a process that compiles and tunes exceeds weights and caches."""
    m = case["memory"]
    return m["peak_bytes_while_compiling"] / (m["weights_bytes"] + m["caches_bytes"]) - 1


def steps(results: list[Result]) -> str:
    """Every whole case: milliseconds of a step's parts, and the whole beside its floor."""
    cases = sorted(full_cases(results), key=lambda c: (c["shape"] or "", c["context"], c["batch"]))
    rows = [
        [
            c["shape"] or c["weights"], f"{c['batch']}", f"{c['context']:.0f} of {c['capacity']}",
            *(ms(c[part]) for part in ("plain", "verify", "draft", "step")),
            f"{c['step']['floor_ms']:.2f}", share(c["step"]),
        ]
        for c in cases
    ]  # fmt: skip
    head = ["shape", "batch", "context", "plain", "verify", "draft", "step", "floor", "share"]
    return table(head, rows, cases)


def widths(results: list[Result]) -> str:
    """Milliseconds of a step by block width and batch, and the best width by acceptance length."""
    cases = [c for c in all_cases(results) if len(c["widths"]) > 1 and c["shape"] == GOAL_SHAPE]
    columns = sorted({row["block_size"] for c in cases for row in c["widths"]})
    rows, best = [], []
    for case in sorted(cases, key=lambda c: c["batch"]):
        times = {row["block_size"]: row["ms"] for row in case["widths"]}
        label = f"batch {case['batch']}"
        rows.append([label, *(f"{times[w]:.2f}" if w in times else "" for w in columns)])
        best.append([label, *(best_cell(times, case["block_size"], tau) for tau in TAUS)])
    first = table(["ms a step at width", *map(str, columns)], rows, [])
    return first + "\n\n" + table(
        ["best width (gain over the widest) at τ", *(f"{tau:g}" for tau in TAUS)], best, cases
    )  # fmt: skip


def best_cell(times: dict[int, float], full: int, tau: float) -> str:
    """The best width for a drafter that commits `tau` tokens a step at its full width."""
    accepted = geometric_profile(tau, full)
    width = best_width(times, accepted)
    gain = expected_tokens(accepted, width) / times[width] * times[full] / tau - 1
    return f"{width} (+{gain:.0%})" if width != full else f"{width}"


def reference(results: list[Result]) -> str:
    """The authors' PyTorch code beside jflash, on the same weights."""
    found = [
        (r.content["reference"], c)
        for r, c in pairs_of(results)
        if "reference" in r.content and c["batch"] == 1
    ]
    rows = []
    for theirs, case in found:
        ratio = theirs["times_as_long"]
        versions = f"dflash {theirs['versions']['dflash']}, torch {theirs['versions']['torch']}"
        for label, part, a in (("plain", "plain", "plain"), ("DFlash step", "dflash", "step")):
            milliseconds = theirs[part]["ms_per_step"]
            rows.append(
                [f"{case['shape']}, {label}", f"{milliseconds:.1f}", ms(case[a]),
                 f"{ratio[a]:.1f} ×", versions]
            )  # fmt: skip
    head = ["batch 1, ms", "PyTorch", "jflash", "ratio", "versions"]
    return table(head, rows, [case for _, case in found])


def beside(results: list[Result]) -> str:
    """Steps of shapes that were timed in turns with another one."""
    cases = [c for c in all_cases(results) if "beside" in c]
    rows = [
        [
            c["shape"], f"{c['batch']}", ms(c["step"]), c["beside"]["shape"],
            ms(c["beside"]["step"]), f"{c['beside']['times_as_long']:.3f} ×",
        ]
        for c in cases
    ]  # fmt: skip
    return table(["shape", "batch", "step", "beside", "its step", "as long"], rows, cases)


def pairs(results: list[Result]) -> str:
    """Tokens a second of real pairs, measured."""
    cases = [c for c in all_cases(results) if "measured_speed" in c]
    rows = [
        [
            c["weights"], f"{c['batch']}", f"{m['mean_acceptance_length']:.2f}",
            f"{m['tokens_per_second']:.0f}", f"{m['plain_tokens_per_second']:.0f}",
            f"{m['speed_up']:.2f} ×",
        ]
        for c in cases
        for m in [c["measured_speed"]]
    ]  # fmt: skip
    return table(["pair", "batch", "τ", "tokens/s", "plain tokens/s", "speed-up"], rows, cases)


def kernels(results: list[Result]) -> str:
    """Kernels by shape: microseconds of each backend; bandwidth and error of the first, ours."""
    found = [r for r in results if "rows" in r.content]
    cases: list[dict[str, Any]] = [r.content | {"file": r.name} for r in found]
    timed = [row for case in cases for row in case["rows"] if "us" in row]
    backends = list(dict.fromkeys(row["backend"] for row in timed))
    by_shape: dict[tuple[str, str], dict[str, Any]] = {}
    for row in timed:
        by_shape.setdefault((row["op"], row["shape"]), {})[row["backend"]] = row
    rows = []
    for (op, shape), measured in by_shape.items():
        ours = next(iter(measured.values()))
        times = [f"{measured[b]['us']:.1f}" if b in measured else "" for b in backends]
        rows.append([op, shape, *times, percent(ours["share"]), f"{ours['error']:.1e}"])
    head = ["op", "shape", *(f"{b}, µs" for b in backends), "of bandwidth", "error"]
    return table(head, rows, cases)


def lossless(results: list[Result]) -> str:
    """What check_lossless.py found, a run a line: everything compared with the oracles' own."""
    found = [r for r in results if "planted_fault" in r.content]
    cases: list[dict[str, Any]] = [r.content | {"file": r.name} for r in found]
    rows = []
    for case in sorted(cases, key=lambda c: -c["tokens"]):
        pairs = dict.fromkeys(check["pair"] for check in case["checks"])
        batches = sorted({check["batch"] for check in case["checks"]})
        fault = case["planted_fault"]
        caught = fault["with"]["differences"] and not fault["without"]["differences"]
        rows.append([
            ", ".join(pairs), ", ".join(map(str, batches)), f"{case['tokens']:,}",
            f"{case['differences']}",
            f"{min(case['replay_histogram']):,}", "caught" if caught else "NOT CAUGHT",
        ])  # fmt: skip
    head = [
        *("pair", "batches", "tokens of the oracles", "differences, in any mode"),
        *("steps replayed of each length, at least", "planted fault"),
    ]
    return table(head, rows, cases)


def evaluations(results: list[Result]) -> str:
    """Data sets decoded by a real pair: acceptance, speed, and whose tokens they are."""
    cases = [
        r.content["environment"] | r.content | {"file": r.name}
        for r in results
        if "acceptance" in r.content
    ]
    rows = []
    for case in sorted(cases, key=evaluation_order):
        s, plain, same = case["settings"], case.get("baseline"), case.get("same_as")
        ended, rest = case["acceptance"]["ended"], case["acceptance"]["limit_or_looping"]
        ratios = (plain["speed_up"], plain["speed_up_with_prefill"]) if plain else ()
        rows.append([
            s["dataset"], evaluation_way(s), f"{s['batch']}",
            f"{ended['tau_pooled']:.2f} ({ended['prompts']})",
            f"{rest['tau_pooled']:.2f} ({rest['prompts']})",
            f"{case['speed']['tokens_per_second']:,.0f}",
            " / ".join(f"{ratio:.2f} ×" for ratio in ratios),
            f"{same['identical_outputs']} of {same['answers']}" if same else "",
        ])  # fmt: skip
    head = [
        *("data set", "decoding", "batch", "τ, ended (answers)", "τ, looping or cut (answers)"),
        *("tokens/s", "speed-up / with prefill", "same tokens as the trained drafter"),
    ]
    return table(head, rows, cases)


def evaluation_way(settings: dict[str, Any]) -> str:
    """How an evaluation decoded: the drafter if it is not the trained one, and the draws."""
    if settings["oracle"]:
        return "oracle: no draft accepted"
    if str(settings["drafter"]).startswith("random"):
        return "random drafter"
    if settings["temperature"] == 0:
        return "greedy"
    rule = "one-hot drafts" if settings["draft_rule"] == "greedy" else "drafts drawn from q"
    return f"temperature {settings['temperature']:g}, {rule}"


def evaluation_order(case: dict[str, Any]) -> tuple[Any, ...]:
    s = case["settings"]
    return s["dataset"], s["temperature"], evaluation_way(s) != "greedy", s["batch"], case["file"]


def families(results: list[Result]) -> str:
    """What is supported of each family of targets; every "yes" links to the test or result."""
    found = [row for r in results for row in r.content.get("families", [])]
    rows = [
        [
            row["family"],
            *(f"[yes]({row[name].split('::')[0]})" if row[name] else "no" for name in CELLS),
        ]
        for row in found
    ]
    return table(["family", *CELLS], rows, [])


TABLES: dict[str, Callable[[list[Result]], str]] = {
    "goals": goals,
    "steps": steps,
    "widths": widths,
    "reference": reference,
    "beside": beside,
    "pairs": pairs,
    "kernels": kernels,
    "lossless": lossless,
    "evaluations": evaluations,
    "families": families,
}


def pairs_of(results: list[Result]) -> Iterable[tuple[Result, dict[str, Any]]]:
    """Every case with its file and what its file says of the device."""
    for result in results:
        shared = {k: v for k, v in result.content.items() if k not in ("cases", "reference")}
        for case in result.content.get("cases", []):
            yield result, shared | case | {"file": result.name}


def all_cases(results: list[Result]) -> list[dict[str, Any]]:
    return [case for _, case in pairs_of(results)]


def full_cases(results: list[Result]) -> list[dict[str, Any]]:
    return [case for case in all_cases(results) if "plain" in case]


def only(cases: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The one case, None without any; ValueError if several files hold it."""
    if len(cases) > 1:
        names = ", ".join(sorted(case["file"] for case in cases))
        raise ValueError(f"{names} hold the same case: keep one of them")
    return cases[0] if cases else None


def near(case: dict[str, Any], context: int) -> bool:
    return abs(case["context"] - context) <= NEAR * context


def ms(part: dict[str, Any]) -> str:
    return f"{part['ms']:.2f} ms"


def share(part: dict[str, Any]) -> str:
    return percent(part["share_of_floor"])


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def table(head: list[str], rows: list[list[str]], cases: list[dict[str, Any]]) -> str:
    """Markdown, and a line on where and when the cases were measured."""
    if not rows:
        return "Not measured yet."
    lines = [head, ["---"] * len(head), *(row + [""] * (len(head) - len(row)) for row in rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    where: dict[str, set[str]] = {}
    for c in cases:
        measured = f"{c['device']}, jax {c['versions']['jax']}, {c['date']}"
        where.setdefault(measured, set()).add(f"`benchmarks/{c['file']}`")
    notes = [f"{measured}: {', '.join(sorted(files))}" for measured, files in sorted(where.items())]
    return text if not notes else text + "\n\n" + "; ".join(notes) + "."
