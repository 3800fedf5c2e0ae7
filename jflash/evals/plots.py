"""The acceptance of an evaluation as three pictures; each file is whole or not there."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jflash.system.files import replacing


def write_plots(folder: Path, summary: dict[str, Any], title: str) -> None:
    """histogram.png, position.png and progress.png, each of all answers."""
    acceptance = summary["acceptance"]
    histogram = acceptance["all"]["histogram"]
    steps = max(1, sum(histogram))

    def by_length(axes: Axes) -> None:
        lengths = range(1, len(histogram) + 1)
        axes.bar(lengths, [count / steps for count in histogram])
        axes.set(xlabel="tokens committed by a step", ylabel="share of steps")
        tau = acceptance["all"]["tau_pooled"]
        if tau is not None:
            axes.axvline(tau, color="black", linestyle="--", label=f"τ = {tau:.2f} (pooled)")
            axes.legend()

    positions = summary["acceptance_by_position"]

    def by_position(axes: Axes) -> None:
        x = [row["position"] for row in positions]
        for name, label in (
            ("accepted_when_tried", "when all before it were accepted"),
            ("accepted_of_all_steps", "of all steps"),
        ):
            y = [float("nan") if row[name] is None else row[name] for row in positions]
            axes.plot(x, y, marker="o", label=label)
        axes.set(xlabel="position of the draft in its block", ylabel="share accepted")
        axes.set_ylim(0, 1.03)
        if positions:
            axes.legend()

    deciles = summary["acceptance_by_progress"]

    def by_progress(axes: Axes) -> None:
        heights = [float("nan") if row["tau"] is None else row["tau"] for row in deciles]
        middles = [100 * (row["from"] + 0.5 / len(deciles)) for row in deciles]
        axes.bar(middles, heights, width=90 / len(deciles))
        axes.set(xlabel="progress through the answer, %", ylabel="tokens a step")

    pictures = {"histogram": by_length, "position": by_position, "progress": by_progress}
    for name, draw in pictures.items():
        _write(folder / f"{name}.png", draw, title)


def _write(file: Path, draw: Any, title: str) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    with replacing(file) as part:
        figure.savefig(part, format="png", dpi=120)
