"""Where a run's numbers go: metrics.jsonl, curriculum.jsonl, TensorBoard, the terminal,
summary.json."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from fastsac.core.metrics import MetricValue, final_value, reduce_over_ticks

if TYPE_CHECKING:
    from torch import Tensor

PLAIN_INTERVAL_S = 2.0
"""Least time between two lines of a `PlainDisplay`, s."""
BIN_DIGITS = 5
"""Significant digits of a number in curriculum.jsonl."""


class MetricAccumulator:
    """The fleet's metrics since the last record."""

    def __init__(self) -> None:
        self._values: dict[str, MetricValue] = {}

    def add(self, values: Mapping[str, MetricValue]) -> None:
        """Count a tick's values; a tick may come in several calls of different names."""
        self._values = reduce_over_ticks([self._values, values])

    def take(self) -> dict[str, float]:
        """One number per metric (NaN for a mean over nothing), and start afresh."""
        values, self._values = self._values, {}
        return {name: final_value(value) for name, value in values.items()}


class RunLog:
    """Appends records to metrics.jsonl and to TensorBoard, at x = fleet-wide env steps.

    The bins of a curriculum go to curriculum.jsonl, one line per record: `env_steps`, and a list
    of numbers of `BIN_DIGITS` digits per state. The file is there only if a run has such states.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        self._bins_path = run_dir / "curriculum.jsonl"
        self._events = _TensorBoard(run_dir / "tensorboard") if tensorboard else None

    def write(
        self,
        env_steps: int,
        values: Mapping[str, float],
        bins: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Append one record; what is not finite becomes null.

        Args:
            bins: (num_bins,) finite numbers by state, of a curriculum.
        """
        numbers = {n: float(v) if math.isfinite(v) else None for n, v in values.items()}
        record = {"env_steps": env_steps, **numbers}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            self._events.write(env_steps, {n: v for n, v in numbers.items() if v is not None})
        if bins:
            self._write_bins(env_steps, {name: value.tolist() for name, value in bins.items()})

    def truncate_after(self, env_steps: int) -> None:
        """Drop the records newer than the checkpoint that a run goes on from."""
        self._file.close()
        had_records = _truncate_after(self._path, env_steps)
        self._file = self._path.open("a", encoding="utf-8")
        if self._bins_path.exists():
            _truncate_after(self._bins_path, env_steps)
        if self._events is not None and had_records:
            self._events.purge_after(env_steps)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _write_bins(self, env_steps: int, bins: Mapping[str, list[float]]) -> None:
        record = {n: [float(f"{v:.{BIN_DIGITS}g}") for v in values] for n, values in bins.items()}
        with self._bins_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"env_steps": env_steps, **record}, allow_nan=False) + "\n")
        if self._events is not None:
            self._events.write_bins(env_steps, bins)


class _TensorBoard:
    """TensorBoard's own writer, which imports eight times faster than torch's around it."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2  # generated code, without types
        self._summary: Any = summary_pb2
        self._writer = EventFileWriter(str(folder), flush_secs=10)

    def write(self, env_steps: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Summary.Value(tag=n, simple_value=v) for n, v in values.items()]
        self._add(step=env_steps, summary=self._summary.Summary(value=scalars))

    def write_bins(self, env_steps: int, bins: Mapping[str, list[float]]) -> None:
        """A histogram per state whose x is the bin's number and whose height is its value."""
        histograms = [
            self._summary.Summary.Value(
                tag=f"curriculum/{name}",
                histo=self._summary.HistogramProto(
                    min=0,
                    max=len(values),
                    num=sum(values),
                    bucket_limit=range(1, len(values) + 1),
                    bucket=values,
                ),
            )
            for name, values in bins.items()
        ]
        self._add(step=env_steps, summary=self._summary.Summary(value=histograms))

    def purge_after(self, env_steps: int) -> None:
        """A session that starts at a step makes TensorBoard forget what was there from it on."""
        start = self._event.SessionLog.START
        self._add(step=env_steps + 1, session_log=self._event.SessionLog(status=start))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), **fields))


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Records of a run, oldest first; a last line that was cut off is left out, null is NaN.

    Raises:
        ValueError: no metrics.jsonl there, or a line before the last one is damaged.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run_dir} has no metrics.jsonl: give the folder of a run")
    records = _parse_records(path.read_text(encoding="utf-8"), path)
    return [{n: math.nan if v is None else v for n, v in r.items()} for r in records]


def read_bins(run_dir: Path) -> list[dict[str, Any]]:
    """Records of a run's curriculum, oldest first: `env_steps` and a list of numbers per state.

    Raises:
        ValueError: the run has no such states, or a line before the last one is damaged.
    """
    path = run_dir / "curriculum.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{run_dir} has no curriculum.jsonl: give the folder of a run whose environment has "
            "a shard state of several bins"
        )
    return _parse_records(path.read_text(encoding="utf-8"), path)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json; a reader sees the old one or the new one, whole."""
    _replace_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


class Display(Protocol):
    """What a person sees of a run while it trains."""

    def message(self, text: str) -> None: ...

    def update(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Show the newest number of every metric."""
        ...

    def close(self) -> None: ...


def make_display(total_env_steps: int, start_env_steps: int) -> Display:
    """A live display on a terminal, plain lines elsewhere."""
    console = Console()
    if console.is_terminal:
        return LiveDisplay(console, total_env_steps, start_env_steps)
    return PlainDisplay(total_env_steps, start_env_steps)


class LiveDisplay:
    """A progress bar with the time left, above the newest numbers."""

    def __init__(self, console: Console, total_env_steps: int, start_env_steps: int) -> None:
        self._progress = Progress(
            TextColumn("env steps"),
            BarColumn(bar_width=None),
            TaskProgressColumn("{task.completed:,.0f} / {task.total:,.0f}"),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_env_steps, completed=start_env_steps)
        self._live = Live(self._progress, console=console, refresh_per_second=4)
        self._live.start()

    def message(self, text: str) -> None:
        self._live.console.print(text)

    def update(self, env_steps: int, values: Mapping[str, float]) -> None:
        self._progress.update(self._task, completed=env_steps)
        self._live.update(Group(self._progress, Text("  ".join(_parts(values)))))

    def close(self) -> None:
        self._live.stop()


class PlainDisplay:
    """One line per record, not too often; a new evaluation always gets one."""

    def __init__(
        self,
        total_env_steps: int,
        start_env_steps: int,
        *,
        min_interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        self._total_env_steps = total_env_steps
        self._start_env_steps = start_env_steps
        self._min_interval_s = min_interval_s
        self._started = time.monotonic()
        self._printed = -math.inf
        self._evaluation: float | None = None

    def message(self, text: str) -> None:
        print_while_read(text)

    def update(self, env_steps: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        evaluation = values.get("eval/return")
        if evaluation == self._evaluation and now - self._printed < self._min_interval_s:
            return
        self._printed, self._evaluation = now, evaluation
        pace = (now - self._started) / max(1, env_steps - self._start_env_steps)
        eta_s = max(0, self._total_env_steps - env_steps) * pace
        head = f"env steps {env_steps:,} / {self._total_env_steps:,}"
        self.message("  ".join([head, f"eta {_duration(eta_s)}", *_parts(values)]))

    def close(self) -> None:
        pass


def print_while_read(text: str) -> None:
    """Print a line to stdout. Once its reader is gone (`fastsac train ... | head -1`), this and
    all that follows goes nowhere: a run is worth more than its display."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _parts(values: Mapping[str, float]) -> list[str]:
    """The numbers worth watching, as far as they are there."""
    shown = {
        "eval/return": "eval return {:.1f}",
        "train/return": "train return {:.1f}",
        "time/env_steps_per_s": "env steps/s {:,.0f}",
        "time/updates_per_s": "updates/s {:,.0f}",
        "fleet/utd": "UTD {:.3g}",
        "fleet/staleness": "staleness {:.3g}",
        "replay/fill": "replay {:.0%}",
    }
    parts = [text.format(values[name]) for name, text in shown.items() if name in values]
    for name in values:
        if name.startswith("curriculum/") and name.endswith("/entropy"):
            state = name.removesuffix("/entropy")
            drift = values[f"{state}/tv_max"]
            parts.append(
                f"{state.removeprefix('curriculum/')} entropy {values[name]:.2f}, drift {drift:.3f}"
            )
    if "time/collect" in values and "time/learn" in values:
        collectors_are_slower = values["time/collect"] > values["time/learn"]
        parts.append(f"waits for {'collectors' if collectors_are_slower else 'learners'}")
    return parts


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"


def _parse_records(text: str, path: Path) -> list[dict[str, Any]]:
    lines = text.splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise ValueError(f"{path} line {number} is damaged: remove the line") from None
    return records


def _truncate_after(path: Path, env_steps: int) -> bool:
    """Drop the records of a file beyond `env_steps`; returns whether it held anything."""
    text = path.read_text(encoding="utf-8")
    kept = [json.dumps(r) + "\n" for r in _parse_records(text, path) if r["env_steps"] <= env_steps]
    _replace_text(path, "".join(kept))
    return bool(text)


def _replace_text(path: Path, text: str) -> None:
    """Put `text` in the place of a file so that the file is whole at every moment."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
