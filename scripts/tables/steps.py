"""Tables of times: steps beside their goals and floors, widths, kernels."""

from typing import Any

from jflash.bench.floors import Rates, Work, floor_seconds
from jflash.bench.shapes import SHAPES
from jflash.bench.steps.cases import rows_of
from jflash.bench.steps.widths import best_width, expected_tokens, geometric_profile
from pallas_kernels.shapes import MATMUL
from tables.cells import (
    Result,
    all_cases,
    at_context,
    full_cases,
    ms,
    percent,
    share,
    step_rows,
    table,
    the_one,
    with_key,
)

GOALS = (  # what, the goal, batch, context, part and number of a qwen3-8b case
    ("plain decoding, batch 1", 4.3, 1, 1024, "plain"),
    ("DFlash step, batch 1", 5.1, 1, 1024, "step"),
    ("DFlash step, batch 8", 6.2, 8, 1024, "step"),
    ("DFlash step, batch 32", 15.0, 32, 1024, "step"),
    ("DFlash step, batch 1, context 32k of 32k", 6.8, 1, 32768, "step"),
)
GOAL_SHAPE = "qwen3-8b"
PRODUCTS = ("qkv", "out", "gate-up", "down")  # of a layer
KINDS = {"plain": "plain", "step": "DFlash step", "float8": "the same, drafter in float8"}
TAUS = (3.0, 4.0, 5.0, 6.4, 8.0)


def kind_name(kind: str) -> str:
    rows = rows_of(kind)
    return KINDS[kind] if rows is None else f"DFlash step of {rows} rows a sequence"


def goals(results: list[Result]) -> str:
    """The goals of the step at Qwen3-8B's shapes on one H200, and what was measured."""
    whole = full_cases(results)
    steps_only = [c for c in all_cases(results) if c not in whole and len(c.get("widths", ())) == 1]
    rows, used = [], []
    for what, goal, batch, context, part in GOALS:
        fits = [
            [c for c in cases if c["shape"] == GOAL_SHAPE and c["batch"] == batch
             and at_context(c, context) and part in c]
            for cases in (whole, steps_only)
        ]  # fmt: skip
        case = the_one(fits[0] or fits[1])
        if case is None:
            rows.append([what, f"≤ {goal} ms", "not measured"])
            continue
        used += [] if case in used else [case]
        p = case[part]
        rows.append([what, f"≤ {goal} ms", ms(p), f"{p['floor_ms']:.2f}", share(p)])
    first = the_one([c for c in used if c["batch"] == 1 and at_context(c, 1024)])
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

    def name(c: dict[str, Any]) -> str:
        return kept_as(c) if c["shape"] else c["weights"]

    cases = sorted(full_cases(results), key=lambda c: (name(c), c["context"], c["batch"]))
    rows = [
        [
            name(c), c["batch"], f"{c['context']:.0f} of {c['capacity']}",
            *(ms(c[part]) if part in c else "" for part in ("plain", "verify", "draft", "step")),
            f"{c['step']['floor_ms']:.2f}", share(c["step"]),
        ]
        for c in cases
    ]  # fmt: skip
    head = ["shape", "batch", "context", "plain", "verify", "draft", "step", "floor", "share"]
    return table(head, rows, cases)


def whole_steps(results: list[Result]) -> str:
    """Whole steps by shape, kind and context, a column a batch; the last file's time counts."""
    found = sorted(with_key(results, "step_times"), key=lambda file: (file["date"], file["file"]))
    last = {
        (kept_as(row), row["kind"], row["context"], row["batch"]): (row, file)
        for file in found
        for row in step_rows(file)
        if row.get("places", "slots") == "slots"
    }
    times = {key: row for key, (row, _) in last.items()}
    batches = sorted({batch for *_, batch in times})
    rows = [
        [shape, kind_name(kind), context, *(
            _time(times[shape, kind, context, batch])
            if (shape, kind, context, batch) in times else "" for batch in batches
        )]
        for shape, kind, context in sorted({key[:3] for key in times}, key=_order)
    ]  # fmt: skip
    head = ["shape", "ms of", "context", *(f"batch {batch}" for batch in batches)]
    return table(head, rows, [file for _, file in last.values()])


def _order(key: tuple[str, str, int]) -> tuple[Any, ...]:
    """By the shape, plain steps first and steps of fewer rows last, the longest context first."""
    shape, kind, context = key
    return shape, list(KINDS).index(kind) if kind in KINDS else len(KINDS), kind, -context


def _time(row: dict[str, Any]) -> str:
    """Milliseconds, and the share of the floor where the row has one."""
    if "share_of_floor" not in row:
        return f"{row['ms']:.2f}"
    return f"{row['ms']:.2f} ({share(row)})"


def kept_as(case: dict[str, Any]) -> str:
    """The shape, with the form that its target's layers are kept in."""
    kept, _, scales = (case.get("quantised") or "").partition("-")
    scales = f" with scales of {scales}" if scales else ""
    return case["shape"] + (f", layers in {kept.upper()}{scales}" if kept else "")


def spent(results: list[Result]) -> str:
    """A verify of Qwen3-8B's beside its products and its attention, timed kernel by kernel."""
    layers = SHAPES[GOAL_SHAPE].target.num_layers
    kernel = {
        (row["backend"], row["shape"]): (row["us"] / 1e3, case)
        for case in with_key(results, "rows")
        for row in case["rows"]
        if "us" in row
    }
    rows, used = [], []
    for case in sorted(full_cases(results), key=lambda c: c["batch"]):
        m = case["batch"] * case["block_size"]  # rows of a product
        attention = ("mosaic_gpu", f"qwen3-b{case['batch']}-2k")
        often = {f"{GOAL_SHAPE}-{name}-m{m}": layers for name in PRODUCTS}
        often[f"{GOAL_SHAPE}-head-m{m}"] = 1
        keys = [*(("tuned", shape) for shape in often), attention]
        if (
            case["shape"] != GOAL_SHAPE
            or not at_context(case, 1024)
            or not kernel.keys() >= {*keys}
        ):
            continue
        rates = Rates(*(case["floors"][name] for name in Rates._fields))
        products = sum(n * kernel["tuned", shape][0] for shape, n in often.items())
        floor = 1e3 * sum(n * floor_seconds(product(shape), rates) for shape, n in often.items())
        rows.append([
            case["batch"], ms(case["verify"]), f"{products:.2f} ms", f"{floor:.2f} ms",
            percent(floor / products), f"{layers * kernel[attention][0]:.2f} ms",
        ])  # fmt: skip
        used += [case, *(kernel[key][1] for key in keys)]
    head = ["batch", "verify", "its products", "their floor", "share", "its attention"]
    return table(head, rows, used)


def product(name: str) -> Work:
    """The weight bytes and operations of a product in bfloat16."""
    shape = MATMUL[name]
    weights = float(shape.K * shape.N)
    return Work(2 * weights, 2 * shape.M * weights, 0.0, 0.0)


def widths(results: list[Result]) -> str:
    """Milliseconds of a step by block width and batch, and the best width by acceptance length."""
    cases = [
        c for c in all_cases(results) if len(c.get("widths", ())) > 1 and c["shape"] == GOAL_SHAPE
    ]
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


def in_turns(results: list[Result]) -> str:
    """Steps of shapes that were timed in turns with another one."""
    cases = [c for c in all_cases(results) if "beside" in c]
    rows = [
        [
            c["shape"], c["batch"], ms(c["step"]), c["beside"]["shape"],
            ms(c["beside"]["step"]), f"{c['beside']['times_as_long']:.3f} ×",
        ]
        for c in cases
    ]  # fmt: skip
    return table(["shape", "batch", "step", "beside", "its step", "as long"], rows, cases)


def kernels(results: list[Result]) -> str:
    """Kernels by shape: microseconds of each backend; bandwidth and error of the first, ours."""
    cases = with_key(results, "rows")
    cases.sort(key=lambda case: -len(case["rows"]))  # the widest run has the columns
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
