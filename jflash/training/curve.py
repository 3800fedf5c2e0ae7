"""A run's loss curve on disk, as numbers and as a picture; each file is whole or not there."""

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm


def write_json(path: Path, value: Any) -> None:
    """Through a file beside it and a rename, so that a reader never sees half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.rename(path)


def write_curve(directory: Path, history: list[dict[str, Any]], title: str) -> None:
    """`curve.json` and `curve.png`: the loss, and every other scalar metric, by step."""
    write_json(directory / "curve.json", history)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        tqdm.write("matplotlib is not installed: curve.png was not drawn", nolock=True)
        return
    scalars = [k for k, v in history[-1].items() if k != "step" and isinstance(v, float)]
    figure = Figure(figsize=(7, 2.2 * len(scalars)), layout="constrained")
    axes = figure.subplots(len(scalars), 1, sharex=True, squeeze=False)[:, 0]
    steps = [record["step"] for record in history]
    for axis, name in zip(axes, scalars, strict=True):
        axis.plot(steps, [record[name] for record in history], linewidth=1)
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0].set_title(title)
    axes[-1].set_xlabel("step")
    part = directory / "curve.png.part"
    figure.savefig(part, format="png", dpi=120)
    part.rename(directory / "curve.png")
