"""What a finished run shows: its learning curve and a table of results."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from fastsac.metrics import read_metrics


def draw_curve(run_dir: Path) -> Path:
    """Draw curve.png: returns against fleet-wide env steps and against training time.

    Raises:
        ValueError: the folder holds no metrics.
    """
    records = read_metrics(run_dir)
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    _draw_returns(by_steps, records, "env_steps", scale=1)
    _draw_returns(by_time, records, "time/wall", scale=1 / 60)
    by_steps.set(xlabel="env steps, fleet-wide", ylabel="return")
    by_steps.xaxis.set_major_formatter("{x:,.0f}")
    by_steps.locator_params(axis="x", nbins=6)
    by_time.set(xlabel="training time, min")
    if by_steps.get_legend_handles_labels()[0]:
        by_steps.legend(loc="best", frameon=False)
    figure.suptitle(run_dir.name)
    path = run_dir / "curve.png"
    figure.savefig(path, dpi=150)
    return path


def _draw_returns(
    axes: Axes, records: Sequence[dict[str, float]], x_name: str, *, scale: float
) -> None:
    def series(name: str) -> tuple[list[float], list[float]]:
        known = [r for r in records if x_name in r and not math.isnan(r.get(name, math.nan))]
        return [r[x_name] * scale for r in known], [r[name] for r in known]

    x, train = series("train/return")
    if x:
        axes.plot(x, train, color="tab:blue", alpha=0.5, linewidth=1, label="training episodes")
    x, evaluation = series("eval/return")
    if x:
        axes.plot(x, evaluation, "o-", color="tab:red", markersize=4, label="evaluation, mean")
    x, lowest = series("eval/return_min")
    if x:
        axes.plot(x, lowest, ":", color="tab:red", linewidth=1, label="evaluation, worst episode")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def result_table(run_dir: Path) -> Table:
    """A run's summary as a table of names and values.

    Raises:
        ValueError: the folder holds no summary or no metrics.
    """
    path = run_dir / "summary.json"
    if not path.is_file():
        raise ValueError(f"{run_dir} has no summary.json: give the folder of a run that ended")
    summary = json.loads(path.read_text(encoding="utf-8"))
    env_steps, updates, wall_s = summary["env_steps"], summary["updates"], summary["wall_s"]
    evaluations = [
        (record["eval/return"], record["env_steps"])
        for record in read_metrics(run_dir)
        if not math.isnan(record.get("eval/return", math.nan))
    ]
    rows = {
        "task": summary["task"],
        "seed": str(summary["seed"]),
        "env steps": f"{env_steps:,}",
        "updates": f"{updates:,}",
        "training time": f"{wall_s:,.1f} s",
    }
    if wall_s > 0:
        rows["env steps/s"] = f"{env_steps / wall_s:,.0f}"
        rows["updates/s"] = f"{updates / wall_s:,.0f}"
    if evaluations:
        best, best_at = max(evaluations)
        rows["final evaluation return"] = f"{evaluations[-1][0]:.1f}"
        rows["best evaluation return"] = f"{best:.1f} at {best_at:,.0f} env steps"
    rows["run"] = str(run_dir)

    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table
