"""The table of steps that several GPUs share, beside the share of time that is the goal."""

from tables.cells import Result, all_cases, at_context, ms, table, the_one

DEVICES = (1, 2, 4)
GOALS = (  # shape, batch, and the most that 1, 2 and 4 GPUs may take of the first's time
    ("qwen3-8b", 1, (None, 0.68, 0.48)),
    ("qwen3-8b", 32, (None, 0.62, 0.40)),
    ("qwen3-32b", 1, (None, None, 0.62)),
    ("qwen3-coder-30b", 1, (None, 0.7, 0.5)),
    ("qwen3-coder-30b", 8, (None, 0.7, 0.5)),
)


def several_gpus(results: list[Result]) -> str:
    """DFlash steps at context 1024; a share is of the smallest number in the same run."""
    runs = [r for r in results if _several(r)]
    rows, used = [], []
    for shape, batch, goals in GOALS:
        cells = []
        for devices, goal in zip(DEVICES, goals, strict=True):
            case = the_one([
                c for c in all_cases(runs)
                if (c["shape"], c["batch"], c["tensor_parallel"]) == (shape, batch, devices)
                and at_context(c, 1024) and c.get("experts_over") != "devices"
            ])  # fmt: skip
            used += [case] if case else []
            text = ms(case["step"]) if case else "not measured"
            if case and "against" in case:
                text += f", {case['against']['share_of_time']:.2f} ×"
            cells.append(text + (f" (goal {goal:.2f} ×)" if goal else ""))
        rows.append([f"{shape}, batch {batch}", *cells])
    head = ["", *(f"{n} GPU{'s' * (n > 1)}" for n in DEVICES)]
    return table(head, rows, used)


def _several(result: Result) -> bool:
    """Whether devices share a case; results from before there were several name no number."""
    return any(case.get("tensor_parallel", 1) > 1 for case in result.content.get("cases", []))
