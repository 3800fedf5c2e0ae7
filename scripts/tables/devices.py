"""The table of steps that several GPUs share, beside the share of time that is the goal."""

from typing import Any

from tables.cells import Result, all_cases, at_context, ms, table, the_one, with_key

DEVICES = (1, 2, 4)
GOALS = (  # shape, batch, and the most that 1, 2 and 4 GPUs may take of the first's time
    ("qwen3-8b", 1, (None, 0.68, 0.48)),
    ("qwen3-8b", 32, (None, 0.62, 0.40)),
    ("qwen3-32b", 1, (None, None, 0.62)),
    ("qwen3-coder-30b", 1, (None, 0.7, 0.5)),
    ("qwen3-coder-30b", 8, (None, 0.7, 0.5)),
)


def several_gpus(results: list[Result]) -> str:
    """DFlash steps at context 1024, a line for each kind of GPU that several of were lent.

    A share is of the smallest number in the same run. What bench-steps timed alone is the newest
    time of its cell, and its share is of the first column's, another run's.
    """
    cases = [case | {"kind": "step"} for case in all_cases([r for r in results if _several(r)])]
    rows, used = [], []
    for shape, batch, goals in GOALS:
        of = (shape, batch)
        timed = {n: [*_of(cases, of, n), *_of(_alone(results), of, n)] for n in DEVICES}
        for gpu in sorted({case["device"] for n in DEVICES[1:] for case in timed[n]}) or [""]:
            cells: list[str] = []
            first = None
            for devices, goal in zip(DEVICES, goals, strict=True):
                here = [case for case in timed[devices] if case["device"] == gpu]
                whole = the_one([case for case in here if "step" in case])
                alone = [case for case in here if "step" not in case]
                case = alone[-1] if alone and not (whole and devices == 1) else whole
                used += [case] if case else []
                text = ms(case.get("step", case)) if case else "not measured"
                if case and "against" in case:
                    text += f", {case['against']['share_of_time']:.2f} ×"
                elif case and first:
                    text += f", {case['ms'] / first:.2f} × of another run"
                first = first or (case and case.get("step", case)["ms"])
                cells.append(text + (f" (goal {goal:.2f} ×)" if goal else ""))
            short = gpu.removeprefix("NVIDIA ").partition(" ")[0]
            rows.append([f"{shape}, batch {batch}", short, *cells])
    head = ["", "on", *(f"{n} GPU{'s' * (n > 1)}" for n in DEVICES)]
    return table(head, rows, used)


def _of(cases: list[dict[str, Any]], of: tuple[str, int], devices: int) -> list[dict[str, Any]]:
    """Whole steps of a shape and batch by so many devices, experts by columns."""
    return [
        case for case in cases
        if (case["shape"], case["batch"]) == of and case["tensor_parallel"] == devices
        and at_context(case, 1024) and case.get("experts_over") != "devices"
        and case["kind"] == "step" and not case.get("quantised")
    ]  # fmt: skip


def _alone(results: list[Result]) -> list[dict[str, Any]]:
    """What bench-steps timed, the newest last."""
    files = sorted(with_key(results, "step_times"), key=lambda file: (file["date"], file["file"]))
    return [
        {name: file[name] for name in ("device", "versions", "date", "file")}
        | {"tensor_parallel": 1} | row
        for file in files
        for row in file["step_times"]
        if row.get("places", "slots") == "slots"
    ]  # fmt: skip


def _several(result: Result) -> bool:
    """Whether devices share a case; results from before there were several name no number."""
    return any(case.get("tensor_parallel", 1) > 1 for case in result.content.get("cases", []))
