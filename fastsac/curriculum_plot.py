"""How a curriculum went: the bins of its shard states over env steps, as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastsac.metrics import read_bins

MAX_COLUMNS = 1000
"""Records drawn; of a longer run, so many at equal distances, the last one among them."""


def draw_curriculum(run_dir: Path) -> Path:
    """Draw curriculum.png: one heat map per state, env steps to the right, bins upwards.

    Raises:
        ValueError: the run has no shard state of several bins.
    """
    records = read_bins(run_dir)
    states = list(dict.fromkeys(name for record in records for name in record))
    states.remove("env_steps")
    figure = Figure(figsize=(10, 3 * len(states)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(states), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(rows, states, strict=True):
        _draw_bins(axes, [record for record in records if name in record], name)
    rows[-1].set_xlabel("env steps, fleet-wide")
    rows[-1].xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(run_dir.name)
    path = run_dir / "curriculum.png"
    figure.savefig(path, dpi=150)
    return path


def _draw_bins(axes: Axes, records: Sequence[dict[str, Any]], name: str) -> None:
    """A column per record, as wide as the env steps since the one before."""
    chosen = np.linspace(0, len(records) - 1, min(len(records), MAX_COLUMNS)).round().astype(int)
    shown = [records[i] for i in chosen]
    bins = np.array([record[name] for record in shown]).T
    edges_x = [0, *(record["env_steps"] for record in shown)]
    image = axes.pcolormesh(edges_x, np.arange(len(bins) + 1) - 0.5, bins, cmap="viridis")
    axes.set(ylabel="bin", title=name)
    axes.figure.colorbar(image, ax=axes)
