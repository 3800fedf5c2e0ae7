"""A run's curves on disk, as numbers and as a picture; each file is whole or not there."""

from pathlib import Path
from typing import Any

from tqdm import tqdm

from jflash.system.files import read_json, replacing


def read_curve(directory: Path) -> list[dict[str, Any]]:
    """The records of `curve.json`, none without it; ValueError if something damaged it."""
    path = directory / "curve.json"
    if not path.exists():
        return []
    try:
        records = read_json(path)
        if not isinstance(records, list) or not all(_has_step(record) for record in records):
            raise ValueError(f"{path} holds no list of records with steps")
    except ValueError as error:
        raise ValueError(
            f"{error}. Without this file the same command begins a new curve"
        ) from None
    return records


def _has_step(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("step"), int)


def draw_curves(directory: Path, history: list[dict[str, Any]], title: str) -> None:
    """Draws `curve.png`: every metric by step in a panel, a list as a line for each of its places.

    A metric that only some records have (τ on held-out prompts) is drawn through those.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        tqdm.write("matplotlib is not installed: curve.png was not drawn", nolock=True)
        return
    names = metric_names(history)
    figure = Figure(figsize=(7, 2.2 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, names, strict=True):
        records = [record for record in history if name in record]
        steps = [record["step"] for record in records]
        axis.plot(
            steps, [record[name] for record in records], linewidth=1,
            marker="." if len(records) < len(history) else None,
        )  # fmt: skip
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.3)
        if isinstance(records[0][name], list):
            _colour_by_place(axis)
    axes[0].set_title(title)
    axes[-1].set_xlabel("step")
    with replacing(directory / "curve.png") as part:
        figure.savefig(part, format="png", dpi=120)


def metric_names(history: list[dict[str, Any]]) -> list[str]:
    """Every metric of any record that is a number or a list of them, as they first appear."""

    def is_numbers(value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        return bool(values) and all(isinstance(v, float) for v in values)

    items = [item for record in history for item in record.items()]
    return list(dict.fromkeys(k for k, value in items if k != "step" and is_numbers(value)))


def _colour_by_place(axis: Any) -> None:
    """Colours from dark (the first place of a block) to light (the last), with a legend."""
    from matplotlib import colormaps

    lines = axis.get_lines()
    for place, line in enumerate(lines):
        line.set_color(colormaps["viridis"](place / max(1, len(lines) - 1)))
    shown = [lines[0], lines[-1]]
    axis.legend(shown, ["place 1", f"place {len(lines)}"], fontsize="small", loc="best")
