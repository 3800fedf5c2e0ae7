"""The table of one arithmetic on several devices, by check_lossless.py --checks devices."""

from typing import Any

from tables.cells import Result, table, with_key

TEXTS = 4  # of the runs from before the check told how many


def law_over_devices(results: list[Result]) -> str:
    """What differed from one device, which should be nothing, and what the planted fault changed:
    at each number of texts."""
    cases = [case for case in with_key(results, "devices") if isinstance(case["devices"], list)]
    cases.sort(key=lambda case: (case["date"], case["file"]))
    rows = []
    for case in cases:
        for pair in dict.fromkeys(one["pair"] for one in case["devices"]):
            runs = [one for one in case["devices"] if one["pair"] == pair]
            compared = [each for one in runs for each in one["compared"]]
            faults = [one["planted"] for one in runs]
            rows.append([
                pair + _form(case, pair),
                ", ".join(map(str, sorted({each["devices"] for each in compared}))),
                _each(one.get("texts", TEXTS) for one in runs),
                *(sum(each[kind] for each in compared) for kind in ("tokens", "kv_rows")),
                *(_each(f"{fault[kind]:,}" for fault in faults) for kind in ("tokens", "kv_rows")),
                f"{case['device'].split()[1]}, {case['date']}: `{case['file']}`",
            ])  # fmt: skip
    head = [
        *("pair", "devices", "texts", "other tokens", "other rows of K and V"),
        *("tokens of the fault", "its rows", "GPU and file"),
    ]
    return table(head, rows, [])


def _form(case: dict[str, Any], pair: str) -> str:
    """The layers of a published size, the target's codes, and how experts lie."""
    form = "" if pair == "tiny-math" else f", {case['layers']} layers"
    form += f", {case['quantised'].upper()}" if case.get("quantised") else ""
    return form + (", whole experts" if case.get("experts_over") == "devices" else "")


def _each(counts: Any) -> str:
    return " / ".join(map(str, counts))
