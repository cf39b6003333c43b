"""Where the wall time of a tick goes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from collectors.collector import CollectReport
from fastsac.core.metrics import MetricValue
from learner.rank import LearnReport


class TickClock:
    """Wall time of the parts of one tick, s."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Book the time since the last mark under `name`."""
        now = time.perf_counter()
        self._parts[name] = now - self._last
        self._last = now

    def metrics(
        self, learned: Sequence[LearnReport], reports: Sequence[CollectReport], schedule: str
    ) -> dict[str, MetricValue]:
        """`time/wait` keeps only what neither collecting nor learning accounts for."""
        collect = max((_seconds(report.metrics, "time/collect") for report in reports), default=0.0)
        learn = max(_seconds(report.metrics, "time/learn") for report in learned)
        busy = max(collect, learn) if schedule == "overlap" else collect + learn
        parts = self._parts | {"time/wait": max(0.0, self._parts["time/wait"] - busy)}
        return {**parts, "time/tick": self._last - self._started}


def _seconds(metrics: Mapping[str, MetricValue], name: str) -> float:
    value = metrics[name]
    assert isinstance(value, float)
    return value
