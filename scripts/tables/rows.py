"""Tables of rows: tokens a second by the rows that a step verifies, and its times."""

from typing import Any

from tables.cells import Result, table, with_key

AUTO, PLAIN = "auto", "plain"


def rows(results: list[Result]) -> str:
    """Tokens a second of a real pair: rows chosen while it runs, fixed widths, plain decoding.

    The fastest of several turns counts. The prefill is in the time where the engine decoded.
    """
    files = with_key(results, "runs", "target")
    ways = {
        (file["file"], r["batch"], r["prompts"], r["way"]): r
        for file in files
        for r in sorted(file["runs"], key=_speed)
        if "way" in r
    }
    named = {file["file"]: name_of(file) for file in files}
    cases = sorted({key[:3] for key in ways}, key=lambda key: (named[key[0]], key[2], key[1]))
    widths = sorted({key[3] for key in ways if key[3].startswith("width")}, key=_width)
    made = []
    for case in cases:
        of = {way: ways[*case, way] for way in (PLAIN, *widths, AUTO) if (*case, way) in ways}
        speeds = {way: _speed(row) for way, row in of.items()}
        best = max(speed for way, speed in speeds.items() if way != AUTO)
        auto = of[AUTO]
        made.append([
            named[case[0]], case[2], case[1],
            *(f"{speeds[way]:,.0f}" if way in speeds else "" for way in (PLAIN, *widths, AUTO)),
            f"{speeds[AUTO] / best:.2f} ×", f"{speeds[AUTO] / speeds[widths[-1]]:.2f} ×",
            f"{auto['tau']:.2f}", f"{auto['same_as_plain']} of {auto['answers']}",
        ])  # fmt: skip
    head = ["target", "prompts", "batch", PLAIN, *widths, AUTO]
    head += ["of the best fixed", f"of {widths[-1]}" if widths else "", "τ", "as plain"]
    return table(head, made, files)


def row_steps(results: list[Result]) -> str:
    """Milliseconds of an engine's step by its rows, and the seconds in which all are compiled."""
    files = with_key(results, "runs")
    timed = [(file, run) for file in files for run in file["runs"] if run.get("step_ms")]
    made = []
    for file, run in sorted(timed, key=lambda each: (name_of(each[0]), each[1]["batch"])):
        batch, ms = run["batch"], {int(r): t for r, t in run["step_ms"].items()}
        cells = [f"{ms[batch * w]:.2f}" if batch * w in ms else "" for w in (1, 2, 4, 8, 16)]
        seconds = run["compile_seconds"], run.get("cached_seconds")
        made.append([name_of(file), batch, *cells, *(f"{s:.0f} s" if s else "" for s in seconds)])
    head = ["", "batch", *(f"{w} rows a sequence" for w in (1, 2, 4, 8, 16))]
    return table([*head, "compiled in", "from the cache"], made, files)


def name_of(content: dict[str, Any]) -> str:
    return content.get("shape") or content["target"].partition(".")[0]


def _speed(run: dict[str, Any]) -> float:
    """Tokens a second; 0 of a run that only timed steps."""
    return run.get("with_prefill", run.get("tokens_per_second", 0))


def _width(way: str) -> int:
    return int(way.removeprefix("width "))
